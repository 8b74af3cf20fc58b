"""This process's node of the DHT: a RecordStore that runs in a thread of its own, and goes on when p2pd dies.

libp2p runs in a child process, p2pd, which dies with this process, and is started again if it dies alone. The node
stores and passes on only records that `records.verify` accepts, and never looks into them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swarm.credentials.authority import Authority
from swarm.dht import addresses
from swarm.dht.addresses import Node
from swarm.dht.known_records import Found, NoOtherNode
from swarm.dht.launcher import Launcher, LoopThread
from swarm.errors import PeerUnavailable
from swarm.machine.clock import Clock

if TYPE_CHECKING:
    from swarm.dht.kademlia import Kademlia

logger = logging.getLogger(__name__)

CALL_SECONDS = 10.0
"""Deadline of a store or a get. Each neighbour that does not answer takes three seconds of it."""
RECONNECT_SECONDS, LONELY_SECONDS = 5.0, 1.0
"""Time between two attempts to reach a known node that has stopped answering; the second while no other one answers."""
ALONE_SECONDS = 120.0
"""If no other node answers for less than this time, the node treats that as an outage, and tries each known node again.
After that it assumes that the others have left for ever, and that its own records are all that there are."""
RESTART_SECONDS, MAX_RESTART_SECONDS = 0.5, 30.0
"""The shortest and the longest wait before p2pd is started again. The wait doubles each time. It is the shortest again
after p2pd has run for MAX_RESTART_SECONDS."""
OPEN_SECONDS, START_SECONDS = 60.0, 30.0
"""Longest wait until the first p2pd is in the DHT, and until a later one is."""
STOP_SECONDS = 2.0
RECONNECTS_AT_ONCE = 4
MAX_REMEMBERED = 64

Result = TypeVar("Result")


class DhtNode:
    """A running node. Made by `start` or `as_client`; its coroutines may be awaited in any event loop."""

    def __init__(self, thread: LoopThread, kademlia: "Kademlia", launcher: Launcher, known: Sequence[Node]) -> None:
        """Must run in `thread`. `known` are other nodes."""
        self.port = launcher.port
        """The TCP port at which this node is asked; 0 if it began as a client."""
        self._thread = thread
        self._kademlia = kademlia
        self._launcher = launcher
        self._known = dict.fromkeys(known)
        """In the order in which they are to be tried."""
        self._alone_since: float | None = None
        self._background = [asyncio.create_task(self._reconnect()), asyncio.create_task(self._stay_alive())]

    def addresses(self) -> list[str]:
        """Multiaddresses, /p2p/ID included, at which others can join; none in client mode."""
        return list(self._kademlia.addresses)

    def belong_to(self, run_keys: Collection[str] | None, authority: Authority | None) -> None:
        """From now on store, pass on and believe only records under the keys of one run, or of all runs if they are
        None, and with an `authority` only its members' records.

        Until this is called, the node accepts only announcements of runs.
        """
        self._launcher.validator.belong_to(run_keys, authority)

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
        """As RecordStore.store does; False only if all nodes that answered refused the record."""
        return await self._call(lambda dht: dht.store(key, subkey, value, expiration))

    async def get(self, key: str, *, partly: bool = False) -> Found:
        """As RecordStore.get does. With `partly` only one of the nodes that keep the key is asked, a different one each
        time."""
        found, is_doubtful = await self._call(partial(self._read, key, partly))
        if is_doubtful:
            raise NoOtherNode(found)
        return found

    async def _read(self, key: str, partly: bool, dht: "Kademlia") -> tuple[Found, bool]:
        """Return the records found, and whether there are probably other nodes that did not answer."""
        if partly and (found := await dht.read_one(key)) is not None:
            self._alone_since = None
            return found, False
        num_answers, now = dht.num_answers, asyncio.get_running_loop().time()
        found = await dht.read_all(key)
        # If no node answered, `found` has only what this node stores itself, as if all other records had expired.
        if dht.num_answers > num_answers or not self._known:
            self._alone_since = None
        elif dht.is_client:
            raise PeerUnavailable("no node of the DHT answers")
        elif self._alone_since is None:
            self._alone_since = now
        return found, self._alone_since is not None and now - self._alone_since < ALONE_SECONDS

    def remember(self, addresses: Sequence[str]) -> None:
        """Remember another node's addresses, to reach it again if it is dropped from the routing table."""
        if self._thread.is_open:
            self._thread.loop.call_soon_threadsafe(self._remember, tuple(addresses))

    def shutdown(self) -> None:
        """Leave the DHT and end p2pd, in a few seconds at most. Calls raise PeerUnavailable from now on."""
        if self._thread.is_open:
            try:
                self._thread.run(self._close())
            finally:
                self._thread.close()

    async def become(self, *, client_mode: bool) -> None:
        """Change between node and client. As a client it cannot be asked, which is right when others do not reach its
        port. When they reach it later, it becomes the former node again, at its old address.

        Raises PeerUnavailable if this peer has left the DHT, and OSError if p2pd cannot be started; then the node goes
        on as it was.
        """
        if not self._thread.is_open:
            raise PeerUnavailable("this peer has left the DHT")
        await self._thread.run_async(self._replace(client_mode))

    async def _replace(self, client_mode: bool) -> None:
        former = self._kademlia
        if former.is_client == client_mode:
            return
        # A client has a libp2p id of its own and no port, so the new node can start while the former one still works.
        self._kademlia = await self._launcher.launch(list(self._known), client_mode=client_mode)
        await former.stop()

    async def _close(self) -> None:
        for task in self._background:
            task.cancel()
        # hivemind may swallow a cancellation. Such a task ends with the thread.
        await asyncio.wait(self._background, timeout=STOP_SECONDS)
        await self._kademlia.stop()

    # -- calls from any loop -------------------------------------------------------------------------------------------

    async def _call(self, call: Callable[["Kademlia"], Coroutine[Any, Any, Result]]) -> Result:
        if not self._thread.is_open:
            raise PeerUnavailable("this peer has left the DHT")
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await self._thread.run_async(self._while_alive(call))
        except TimeoutError:
            raise PeerUnavailable(f"the DHT did not answer within {CALL_SECONDS:.0f} s") from None

    async def _while_alive(self, call: Callable[["Kademlia"], Coroutine[Any, Any, Result]]) -> Result:
        # Without p2pd, hivemind would wait for each neighbour in turn, and then return no records.
        dht = self._kademlia
        task = asyncio.create_task(call(dht))
        try:
            await asyncio.wait({task, dht.ended}, return_when=asyncio.FIRST_COMPLETED)
            if dht.ended.done():
                raise PeerUnavailable("this peer's DHT process, p2pd, has died, and is being started again")
            result = task.result()
        finally:
            task.cancel()
        # A client stores nothing itself, so without neighbours an empty result means nothing.
        if dht.is_client and not dht.has_neighbours:
            raise PeerUnavailable("no node of the DHT answers")
        return result

    # -- staying in the DHT --------------------------------------------------------------------------------------------

    async def _stay_alive(self) -> None:
        clock, wait_seconds = asyncio.get_running_loop().time, RESTART_SECONDS
        while True:
            began_at, present = clock(), self._kademlia
            await asyncio.wait({present.ended})
            if present is not self._kademlia:
                continue  # Another node has replaced it.
            logger.warning(
                "the DHT's process, p2pd, has died: going on with the peers known so far, and starting it again"
            )
            try:
                await self._kademlia.stop()
            except Exception as error:  # noqa: BLE001 - p2pd has died already, and the next one must start
                logger.debug("what p2pd left did not end: %s", error)
            if clock() - began_at > MAX_RESTART_SECONDS:
                wait_seconds = RESTART_SECONDS
            while True:
                await asyncio.sleep(wait_seconds)
                wait_seconds = min(2 * wait_seconds, MAX_RESTART_SECONDS)
                try:
                    async with asyncio.timeout(START_SECONDS):
                        self._kademlia = await self._launcher.launch(list(self._known), client_mode=present.is_client)
                    break
                except Exception as error:  # noqa: BLE001 - hivemind raises all kinds if p2pd dies anew, EOFError too
                    logger.debug("p2pd did not start: %s", error)
            logger.info("p2pd is back, and this peer in the DHT")

    def _remember(self, told: Sequence[str]) -> None:
        for known in addresses.of_nodes(told):
            # This node's own addresses are left out, those from before the last start of p2pd too.
            if known[0] in self._kademlia.addresses or known[0].endswith(f"/p2p/{self._kademlia.libp2p_id}"):
                continue
            # Nodes are kept by their addresses, not by id: an address from one peer must not replace those from others.
            self._known.pop(known, None)
            self._known[known] = None
            if len(self._known) > MAX_REMEMBERED:
                del self._known[next(iter(self._known))]

    async def _reconnect(self) -> None:
        # hivemind drops a neighbour that once fails to answer, and never tries it again. So a short outage would split
        # the network for ever.
        while True:
            is_alone = self._alone_since is not None or not self._kademlia.has_neighbours
            await asyncio.sleep(min(RECONNECT_SECONDS, LONELY_SECONDS) if is_alone else RECONNECT_SECONDS)
            await asyncio.gather(*map(self._reach_again, list(self._known)[:RECONNECTS_AT_ONCE]))

    async def _reach_again(self, known: Node) -> None:
        # The node goes to the end of the queue, even if it does not answer.
        self._known.pop(known, None)
        self._known[known] = None
        await self._kademlia.reach(known)


def start(
    *, clock: Clock, initial_peers: Sequence[str] = (), host: str = "", port: int = 0,
    announce: Sequence[tuple[str, int]] = (), identity_path: Path | None = None, client_mode: bool = False,
) -> DhtNode:  # fmt: skip
    """Start a node and join the others. This process is not forked, so gRPC and threads may be running already.

    Blocks; imports hivemind's DHT, which takes a moment. Of the nodes at `initial_peers`, each perhaps at several
    addresses, one has to answer within waits.JOIN_SECONDS; without any address a new DHT begins. A client asks others,
    but is asked by none and stores nothing.

    Args:
        host: IP address to listen on; empty for all addresses of this machine, of IPv4 and, where it has that, of IPv6.
        port: TCP port to listen on; 0 takes a free one.
        announce: names or IP addresses at which others reach this machine, each with the port there, or 0 for the port
            that is listened on. If it is empty, p2pd announces all addresses that it sees itself.
        identity_path: file with the node's libp2p key, made if missing, so that its address stays the same.

    Raises ValueError if an initial peer is no node's address, or the port is in use; PeerUnavailable, which names the
    addresses and what to check, if the DHT cannot be joined; OSError if p2pd cannot be started.
    """
    addresses.require_all(initial_peers)
    launcher = Launcher(
        clock=clock, host=host, port=port, announce=announce, identity_path=identity_path, client_mode=client_mode
    )
    thread, nodes = LoopThread("dht"), addresses.of_nodes(initial_peers)
    try:
        return thread.run(_opened(thread, launcher, nodes, client_mode=client_mode))
    except BaseException:
        thread.close()
        raise


@asynccontextmanager
async def as_client(clock: Clock, initial_peers: Sequence[str]) -> AsyncIterator[DhtNode]:
    """Be a client inside the block. Joins and raises as `start` does, and blocks only while hivemind's DHT is imported.
    Cancellation ends the attempt to join."""
    addresses.require_all(initial_peers)
    launcher = Launcher(clock=clock, host="", port=0, announce=(), identity_path=None, client_mode=True)
    thread, nodes = LoopThread("dht"), addresses.of_nodes(initial_peers)
    try:
        node = await thread.run_async(_opened(thread, launcher, nodes, client_mode=True))
    except BaseException:
        thread.close()
        raise
    try:
        yield node
    finally:
        node.shutdown()


async def _opened(thread: LoopThread, launcher: Launcher, nodes: Sequence[Node], *, client_mode: bool) -> DhtNode:
    try:
        async with asyncio.timeout(OPEN_SECONDS):
            first = await launcher.launch(nodes, client_mode=client_mode, must_join=True)
    except TimeoutError:
        raise PeerUnavailable(f"the DHT node was not ready within {OPEN_SECONDS:.0f} s: try again") from None
    return DhtNode(thread, first, launcher, nodes)
