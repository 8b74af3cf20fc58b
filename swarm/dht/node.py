"""A node of hivemind's DHT: the only file that imports hivemind.

The programs start one and hand it to directory. hivemind's Kademlia node runs in a thread of this process, libp2p in
a process, p2pd, that dies with this one and is started again if it dies alone. Stores and passes on nothing but
records that `records.verify` accepts. Never looks into them.
"""

import asyncio
import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from swarm.credentials.authority import Authority
from swarm.dht import addresses, daemon
from swarm.dht.directory import NoOtherNode
from swarm.dht.holders import Found, Holders
from swarm.dht.loop_thread import LoopThread
from swarm.dht.records import MAX_LIFETIME_SECONDS
from swarm.dht.validator import RecordValidator
from swarm.errors import PeerUnavailable
from swarm.machine.clock import Clock
from swarm.machine.disk import put_in_place

logger = logging.getLogger(__name__)

CALL_SECONDS = 10.0
"""Deadline of a store or a get. A neighbour that does not answer costs three seconds of it."""
CONNECT_SECONDS = 5.0
RECONNECT_SECONDS = 5.0
"""Time between two attempts to reach nodes that are known but have dropped out of the routing table."""
ALONE_SECONDS = 120.0
"""For how long a node whose neighbours have all gone takes that for an outage: each of them has been tried again by
then. Later they have left for good, and what the node stores itself is all that there is."""
RESTART_SECONDS, MAX_RESTART_SECONDS = 0.5, 30.0
"""Wait before p2pd is started again, doubled each time; it begins anew once p2pd has lived for the longer one."""
START_SECONDS = 30.0
STOP_SECONDS = 2.0
_RECONNECTS_AT_ONCE = 4
_MAX_REMEMBERED = 64

_EXPLANATIONS = {
    "peer id mismatch": "another peer answers there: it restarted under a new identity, so copy its present address",
    "dial to self": "that is this peer's own address: two peers cannot share one identity file",
    "local time": "this machine's clock and theirs differ by more than 3 s: set the time",
}

Result = TypeVar("Result")


class OwnAddress(PeerUnavailable):
    """All that was given to enter the DHT by are addresses of this very node."""


@dataclass(frozen=True, kw_only=True)
class _Running:
    """p2pd, hivemind's node over it, and the addresses at which others find it."""

    process: daemon.Daemon
    p2p: Any
    node: Any
    visible: Sequence[str]


class DhtNode:
    """A running node. Made by `start`; its coroutines may be awaited in any event loop."""

    def __init__(
        self, *, thread: LoopThread, running: _Running, validator: RecordValidator, clock: Clock, known: Sequence[str],
        client_mode: bool, run: Callable[[Sequence[str]], Coroutine[Any, Any, _Running]],
    ) -> None:  # fmt: skip
        """
        Args:
            run: starts it all once more, and joins whoever answers of the nodes with these addresses.
        """
        self._thread = thread
        self._run = run
        self._validator = validator
        self._clock = clock
        self._known = dict.fromkeys(known)
        self._client_mode = client_mode
        self._alone_since: float | None = None
        self._holders: dict[str, Holders] = {}
        self._take(running)
        self._background = [asyncio.create_task(self._reconnect()), asyncio.create_task(self._stay_alive())]

    def _take(self, running: _Running) -> None:
        self._process, self._p2p, self._node = running.process, running.p2p, running.node
        self._visible = list(running.visible)
        self._holders.clear()

    def addresses(self) -> list[str]:
        """Multiaddresses, /p2p/ID included, at which others can join; none in client mode."""
        return list(self._visible)

    def belong_to(self, run_keys: Collection[str], authority: Authority | None) -> None:
        """From now on store, pass on and believe nothing but records under the keys of one run.

        Before, it knows of nothing but which runs there are.

        Args:
            authority: the owner of a locked run: nothing but its members' records.
        """
        self._validator.belong_to(run_keys, authority)

    async def store(
        self, key: str, subkey: str, value: bytes, expiration: float, *, timeout_seconds: float = CALL_SECONDS
    ) -> bool:
        """Store a sealed record until `expiration` (seconds since the epoch).

        Returns:
            False if all nodes that answered refused it: badly signed, or no later than another one that they have.

        Raises:
            PeerUnavailable: no DHT, or no answer in time.
        """
        return await self._call(self._store(key, subkey, value, expiration), timeout_seconds)

    async def _store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
        self._forget_far(key)
        is_stored, all_answered = await self._holders_of(key).store(subkey, value, expiration)
        if not all_answered:
            # Then it goes to others, until as many have it as should. Those that have it by now refuse it.
            search = self._node.store(key, value, expiration, subkey=subkey, exclude_self=self._client_mode)
            is_stored = bool(await search) or is_stored
        return is_stored

    def _holders_of(self, key: str) -> Holders:
        if key not in self._holders:
            self._holders[key] = Holders(self._node, key, self._clock, client_mode=self._client_mode)
        return self._holders[key]

    def _forget_far(self, key: str) -> None:
        """Drop what this node took itself while its clock was ahead: it would refuse all that expires before that, and
        others all that it stores beside it. What others announce comes again."""
        from hivemind.dht.routing import DHTID

        storage, key_id = self._node.protocol.storage, DHTID.generate(key)
        found = storage.get(key_id)
        if found is not None and found.expiration_time > self._clock.time() + MAX_LIFETIME_SECONDS:
            del storage[key_id]

    async def get(
        self, key: str, *, partly: bool = False, timeout_seconds: float = CALL_SECONDS
    ) -> dict[str, tuple[bytes, float]]:
        """All unexpired records under a key: subkey -> (value, expiration).

        Args:
            partly: ask one of the nodes that keep the key, another one each time, and not all; it may miss a record.

        Raises:
            PeerUnavailable: no DHT, or no answer in time.
            NoOtherNode: there were some not long ago.
        """
        records, is_doubtful = await self._call(self._get(key, partly), timeout_seconds)
        if is_doubtful:
            raise NoOtherNode(records)
        return records

    async def _get(self, key: str, partly: bool) -> tuple[Found, bool]:
        if partly and self._has_neighbours and (records := await self._holders_of(key).read()) is not None:
            self._alone_since = None
            return records, False
        # Without `latest`, whatever the node itself stores would do for an answer.
        found = await self._node.get(key, latest=True)
        records = {} if found is None else {subkey: tuple(stored) for subkey, stored in found.value.items()}
        # Without neighbours it does all the same, and everybody else's records would seem to have expired.
        now = asyncio.get_running_loop().time()
        if self._has_neighbours or self._client_mode or not self._known:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        return records, self._alone_since is not None and now - self._alone_since < ALONE_SECONDS

    @property
    def _has_neighbours(self) -> bool:
        return bool(self._node.protocol.routing_table.uid_to_peer_id)

    def remember(self, address: str) -> None:
        """Note another node's address, to reach it again should it drop out of the routing table."""
        if self._thread.is_open:
            self._thread.loop.call_soon_threadsafe(self._remember, address)

    def shutdown(self) -> None:
        """Leave the DHT and end p2pd, in a few seconds at most. Calls raise PeerUnavailable from now on."""
        if self._thread.is_open:
            try:
                self._thread.run(self._close())
            finally:
                self._thread.close()

    async def _close(self) -> None:
        for task in self._background:
            task.cancel()
        # hivemind may swallow a cancellation: then the thread's end is what ends the task.
        await asyncio.wait(self._background, timeout=STOP_SECONDS)
        await self._end()

    async def _end(self) -> None:
        try:
            await self._p2p.shutdown()
        finally:
            await self._process.stop()

    async def _stay_alive(self) -> None:
        clock, wait_seconds = asyncio.get_running_loop().time, RESTART_SECONDS
        while True:
            began_at = clock()
            await asyncio.wait({self._process.ended})
            logger.warning(
                "the DHT's process, p2pd, has died: going on with the peers known so far, and starting it again"
            )
            try:
                await self._end()
            except Exception as error:  # noqa: BLE001 - it is dead already, and what matters is the next one
                logger.debug("what p2pd left did not end: %s", error)
            if clock() - began_at > MAX_RESTART_SECONDS:
                wait_seconds = RESTART_SECONDS
            while True:
                await asyncio.sleep(wait_seconds)
                wait_seconds = min(2 * wait_seconds, MAX_RESTART_SECONDS)
                try:
                    async with asyncio.timeout(START_SECONDS):
                        self._take(await self._run(list(self._known)))
                    break
                except Exception as error:  # noqa: BLE001 - hivemind raises all kinds if p2pd dies anew, EOFError too
                    logger.debug("p2pd did not start: %s", error)
            logger.info("p2pd is back, and this peer in the DHT")

    async def _call(self, call: Coroutine[Any, Any, Result], timeout_seconds: float) -> Result:
        if not self._thread.is_open:
            call.close()
            raise PeerUnavailable("this peer has left the DHT")
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._thread.run_async(self._while_alive(call))
        except TimeoutError:
            raise PeerUnavailable(f"the DHT did not answer within {timeout_seconds:.0f} s") from None

    async def _while_alive(self, call: Coroutine[Any, Any, Result]) -> Result:
        # Without p2pd hivemind would wait for each neighbour in turn, and then report that there is nothing.
        task = asyncio.create_task(call)
        try:
            await asyncio.wait({task, self._process.ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._process.ended.done():
                raise PeerUnavailable("this peer's DHT process, p2pd, has died, and is being started again")
            result = task.result()
        finally:
            task.cancel()
        # A client stores nothing itself, so what it finds without neighbours means nothing.
        if self._client_mode and not self._has_neighbours:
            raise PeerUnavailable("no node of the DHT answers")
        return result

    def _remember(self, address: str) -> None:
        # Its own, or one that it had in an earlier life.
        if address in self._visible or address.endswith(f"/p2p/{self._p2p.peer_id}"):
            return
        self._known.pop(address, None)
        self._known[address] = None
        if len(self._known) > _MAX_REMEMBERED:
            del self._known[next(iter(self._known))]

    async def _reconnect(self) -> None:
        # hivemind drops a neighbour that fails to answer once, and never comes back to it: a short outage would part
        # the network for good.
        while True:
            await asyncio.sleep(RECONNECT_SECONDS)
            await asyncio.gather(*map(self._reach_again, list(self._known)[:_RECONNECTS_AT_ONCE]))

    async def _reach_again(self, address: str) -> None:
        # To the end of the queue, whatever comes of it.
        self._known.pop(address, None)
        try:
            _, peer_id = _parse(address)
        except ValueError:
            return
        self._known[address] = None
        if peer_id not in self._node.protocol.routing_table and await _connect(self._p2p, address) is None:
            await self._node.protocol.call_ping(peer_id)


def start(
    *, clock: Clock, initial_peers: Sequence[str] = (), host: str = "0.0.0.0", port: int = 0,
    announce_hosts: Sequence[str] = (), identity_path: Path | None = None, client_mode: bool = False,
    timeout_seconds: float = 30.0,
) -> DhtNode:  # fmt: skip
    """Start a node and join the others. Blocks; imports hivemind, which takes seconds.

    Does not fork this process: gRPC and threads may be running already.

    Args:
        initial_peers: addresses of nodes to join, of which one has to answer; none starts a new DHT.
        host: IP address to listen on.
        port: TCP port to listen on; 0 takes a free one.
        announce_hosts: names or IP addresses at which others reach this machine; without any, all that it sees itself.
        identity_path: file with the node's libp2p key, made if missing, so that its address stays the same.
        client_mode: ask others, but listen to nobody and store nothing.

    Raises:
        ValueError: an address that is none, or a port in use.
        PeerUnavailable: the DHT cannot be joined; the message names the addresses and what to check.
        OSError: p2pd cannot be started.
    """
    for address in initial_peers:
        addresses.split(address)
    if client_mode:
        options = ["-dhtClient=1", "-noListenAddrs=1"]
    else:
        port = addresses.require_free_port(host, port)
        options = ["-dhtServer=1", f"-hostAddrs={addresses.at(host, port)}"]
        if announce_hosts:
            options.append(f"-announceAddrs={','.join(addresses.at(host, port) for host in announce_hosts)}")
    _import_hivemind()
    if identity_path is not None:
        options.append(f"-id={_libp2p_key(identity_path)}")
    thread = LoopThread("dht")
    try:
        return thread.run(_open(thread, options, initial_peers, client_mode, clock, timeout_seconds))
    except BaseException:
        thread.close()
        raise


async def _open(
    thread: LoopThread, options: Sequence[str], initial_peers: Sequence[str], client_mode: bool, clock: Clock,
    timeout_seconds: float,
) -> DhtNode:  # fmt: skip
    from hivemind.dht.routing import DHTID
    from hivemind.utils import MSGPackSerializer

    # One for all that this node ever starts: what it is told of a locked run has to last.
    validator = RecordValidator(
        clock, hash_key=lambda key: DHTID.generate(key).to_bytes(), pack=MSGPackSerializer.dumps
    )  # fmt: skip

    def run(known: Sequence[str], *, must_join: bool = False) -> Coroutine[Any, Any, _Running]:
        return _start_all(options, known, client_mode, validator, must_join=must_join)

    try:
        async with asyncio.timeout(timeout_seconds):
            running = await run(initial_peers, must_join=True)
    except TimeoutError:
        raise PeerUnavailable(f"the DHT node was not ready within {timeout_seconds:.0f} s: try again") from None
    return DhtNode(
        thread=thread, running=running, validator=validator, clock=clock, known=initial_peers, client_mode=client_mode,
        run=run,
    )  # fmt: skip


async def _start_all(
    options: Sequence[str], known: Sequence[str], client_mode: bool, validator: RecordValidator, *, must_join: bool
) -> _Running:
    """Cancellation leaves nothing behind."""
    async with contextlib.AsyncExitStack() as undo:
        process = await daemon.launch(Path(str(resources.files("hivemind"))) / "hivemind_cli" / "p2pd", options)
        undo.push_async_callback(process.stop)
        p2p, node = await _join(process.control_address, known, client_mode, validator, must_join=must_join)
        undo.push_async_callback(p2p.shutdown)
        visible = [] if client_mode else [str(address) for address in await p2p.get_visible_maddrs(latest=True)]
        undo.pop_all()
    return _Running(process=process, p2p=p2p, node=node, visible=visible)


async def _join(
    control_address: str, initial_peers: Sequence[str], client_mode: bool, validator: RecordValidator, *,
    must_join: bool,
) -> Any:  # fmt: skip
    from hivemind.dht import DHTNode
    from hivemind.dht.protocol import ValidationError
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import P2P
    from hivemind.utils.multiaddr import Multiaddr

    p2p = await P2P.replicate(Multiaddr(control_address))
    faults = await asyncio.gather(*(_connect(p2p, address) for address in initial_peers))
    reached = [address for address, fault in zip(initial_peers, faults, strict=True) if fault is None]
    if must_join and initial_peers and not reached:
        raise _cannot_join(initial_peers, str(faults[0]))
    try:
        node = await DHTNode.create(
            p2p=p2p,
            # After a restart the same as before. With a new one others would know one peer as two nodes, store every
            # record there twice, and take the second refusal for an answer.
            node_id=DHTID.generate(str(p2p.peer_id)),
            initial_peers=reached,
            client_mode=client_mode,
            record_validator=validator,
            # What is cached for a key would hide what was stored under it since.
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
        )
    except (ValidationError, RuntimeError) as error:
        raise _cannot_join(reached, str(error)) from None
    node.protocol.cache = _no_cache()
    node.protocol.storage = _bounded_storage(validator)
    _bound(node.protocol.routing_table)
    return p2p, node


def _no_cache() -> Any:
    """In the place of a node's cache: others may ask for theirs to be kept there, where one record with a late expiry
    hides all that is stored under its key."""
    from hivemind.dht.storage import DHTLocalStorage

    class NoCache(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
        def store(self, *_: Any, **__: Any) -> bool:
            return False

        def store_subkey(self, *_: Any, **__: Any) -> bool:
            return False

    return NoCache()


def _bounded_storage(validator: RecordValidator) -> Any:
    """In the place of a node's storage, which takes any number of records, and for each that is refreshed keeps a note
    until that one expires."""
    from hivemind.dht.storage import DHTLocalStorage
    from hivemind.utils import MSGPackSerializer

    class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
        def store(self, key: Any, value: bytes, expiration_time: float, subkey: str | None = None) -> bool:
            # There are no records without.
            return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

        def store_subkey(self, key: Any, subkey: str, value: bytes, expiration_time: float) -> bool:
            kept = self.get(key)
            former = kept.value.get(subkey) if kept is not None else None
            # hivemind would refuse what expires sooner, and yet let the later one go at that time.
            if former is not None and former.expiration_time >= expiration_time:
                return False
            record = _Record(key.to_bytes(), MSGPackSerializer.dumps(subkey), value, expiration_time)
            if not validator.has_room(record) or not super().store_subkey(key, subkey, value, expiration_time):
                return False
            for timed in (self, self.data[key].value):
                if len(timed.expiration_heap) > 2 * len(timed.data) + 64:
                    timed.expiration_heap = sorted(timed.key_to_heap.values())
            return True

        def __delitem__(self, key: Any) -> None:
            super().__delitem__(key)
            validator.forget(key.to_bytes())

    return BoundedStorage()


@dataclass(frozen=True)
class _Record:
    """As hivemind shows one to a validator: all but the expiration in its wire form."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def _bound(table: Any) -> None:
    """Have hivemind's routing table take no ids that do not follow from a node's key, which one node could have any
    number of, and no more replacements for a bucket's nodes than it has nodes."""
    from hivemind.dht.routing import DHTID

    add = table.add_or_update_node

    def add_or_update_node(node_id: Any, peer_id: Any) -> Any:
        if DHTID.generate(str(peer_id)) != node_id:
            return None
        to_ping = add(node_id, peer_id)
        bucket = table.buckets[table.get_bucket_index(node_id)]
        while len(bucket.replacement_nodes) > bucket.size:
            del table[next(iter(bucket.replacement_nodes))]
        return to_ping

    table.add_or_update_node = add_or_update_node


def _cannot_join(tried: Sequence[str], fault: str) -> PeerUnavailable:
    kind = OwnAddress if "dial to self" in fault else PeerUnavailable
    explanations = (text for needle, text in _EXPLANATIONS.items() if needle in fault)
    default = "check the address, that a swarm-peer runs there, and that its port is open"
    return kind(f"cannot join the DHT at {', '.join(tried)}: {next(explanations, default)}")


async def _connect(p2p: Any, address: str) -> str | None:
    """Open a connection to a node. Returns what was wrong, or None."""
    from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

    endpoint, peer_id = _parse(address)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            # hivemind's P2P has no public way to tell p2pd where a peer is.
            await p2p._client.connect(peer_id, [endpoint])
    except (ControlFailure, EOFError, OSError, TimeoutError) as error:
        logger.debug("cannot connect to %s: %s", address, error)
        return str(error)
    return None


def _parse(address: str) -> tuple[Any, Any]:
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    endpoint, peer_id = addresses.split(address)
    return Multiaddr(endpoint), PeerID.from_base58(peer_id)


def _libp2p_key(path: Path) -> Path:
    from hivemind.p2p import P2P

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        # Which makes it private only once the key is in it.
        mask = os.umask(0o077)
        try:
            P2P.generate_identity(str(temporary))
        finally:
            os.umask(mask)
        put_in_place(temporary, path)
    return path


def _import_hivemind() -> None:
    level = logging.getLogger("hivemind").level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from hivemind.utils.logging import use_hivemind_log_handler
    use_hivemind_log_handler("nowhere")
    # Which its import and the line above have reset.
    logging.getLogger("hivemind").setLevel(level or logging.ERROR)
