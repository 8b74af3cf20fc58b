"""One hivemind DHT node over one p2pd. This is the only file that imports hivemind, which takes seconds.

It bounds what other nodes can do to a hivemind node, which stores and believes only records that the validator accepts,
caches nothing, and refuses made-up ids.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils import MSGPackSerializer
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from swarm.dht import addresses
from swarm.dht.keepers import Keepers
from swarm.dht.known_records import Found, RecordValidator
from swarm.dht.launcher import Daemon, launch_daemon
from swarm.dht.records import MAX_LIFETIME_SECONDS
from swarm.errors import PeerUnavailable
from swarm.machine.clock import Clock
from swarm.machine.disk import replacing
from swarm.machine.waits import patiently

logger = logging.getLogger(__name__)
logging.addLevelName(logging.WARNING, "WARNING")  # hivemind calls it WARN, in the whole process.

# Located through hivemind_cli, because an import of the package hivemind itself would import all of it.
_P2PD = Path(str(resources.files("hivemind.hivemind_cli"))) / "p2pd"
CONNECT_SECONDS = 5.0
LOOK_AROUND_SECONDS = 3.0


class Kademlia:
    """A node that has joined the others: hivemind's node over its connection to p2pd.

    It has `ended` once p2pd has died. After that, every call would wait for each neighbour in turn. Its addresses,
    /p2p/ID included, are those at which others can join; a client has none.
    """

    def __init__(
        self, process: Daemon, p2p: Any, node: Any, addresses: Sequence[str], clock: Clock, *, client_mode: bool
    ) -> None:
        self.ended = process.ended
        self.addresses = list(addresses)
        self.p2p = p2p
        self.node = node
        self._process = process
        self._clock = clock
        self.is_client = client_mode
        self._keepers: dict[str, Keepers] = {}
        self.num_answers = 0
        for call in ("call_ping", "call_find", "call_store"):
            setattr(node.protocol, call, self._counting(getattr(node.protocol, call)))

    @property
    def libp2p_id(self) -> str:
        """The node's id in libp2p, which follows /p2p/ in its addresses."""
        return str(self.p2p.peer_id)

    @property
    def has_neighbours(self) -> bool:
        return bool(self.node.protocol.routing_table.uid_to_peer_id)

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
        """Store a sealed record at the nodes that keep the key; False if all that answered refused it."""
        self._forget_far(key)
        is_stored, all_answered = await self._keepers_of(key).store(subkey, value, expiration)
        if not all_answered:
            # hivemind sends the record to further nodes until enough have it. Nodes that have it already refuse it.
            search = self.node.store(key, value, expiration, subkey=subkey, exclude_self=self.is_client)
            is_stored = bool(await search) or is_stored
        return is_stored

    async def read_all(self, key: str) -> Found:
        """Read the key from all nodes that keep it; without neighbours, from this node alone."""
        # Without `latest`, hivemind asks no other node if this one stores anything under the key.
        found = await self.node.get(key, latest=True)
        return {} if found is None else {subkey: tuple(stored) for subkey, stored in found.value.items()}

    async def read_one(self, key: str) -> Found | None:
        """Read the key from one of the nodes that keep it, a different one each time; None without its answer."""
        return await self._keepers_of(key).read() if self.has_neighbours else None

    async def reach(self, known: addresses.Node) -> None:
        """If a node that had stopped answering answers again, make it a neighbour again."""
        peer_id, protocol, blacklist = _peer_id(known), self.node.protocol, self.node.blacklist
        if peer_id in protocol.routing_table and peer_id not in blacklist:
            return
        if await _connect(self.p2p, known) is None and await protocol.call_ping(peer_id) is not None:
            # Otherwise hivemind would not call the node for a pause that doubles with each failed call.
            blacklist.register_success(peer_id)

    async def stop(self) -> None:
        try:
            await self.p2p.shutdown()
        finally:
            await self._process.stop()

    def _counting(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Wrap a call to other nodes so that its answers are counted: hivemind does not show whether any came."""

        async def counted(*arguments: Any, **options: Any) -> Any:
            answer = await call(*arguments, **options)
            self.num_answers += answer is not None
            return answer

        return counted

    def _keepers_of(self, key: str) -> Keepers:
        if key not in self._keepers:
            self._keepers[key] = Keepers(self.node, key, self._clock, client_mode=self.is_client)
        return self._keepers[key]

    def _forget_far(self, key: str) -> None:
        """Drop what this node has stored under the key, if a record there was accepted while the clock was ahead.

        Because of that record this node would refuse all records that expire earlier, and other nodes would refuse one
        that expires even later. The records of other peers are not lost, because these peers announce them again.
        """
        storage, key_id = self.node.protocol.storage, DHTID.generate(key)
        found = storage.get(key_id)
        if found is not None and found.expiration_time > self._clock.time() + MAX_LIFETIME_SECONDS:
            del storage[key_id]


# -- launching one -----------------------------------------------------------------------------------------------------


def use_own_log(level: int) -> None:
    """Make hivemind log like the rest of the program, at this level and above."""
    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(level)


def new_validator(clock: Clock) -> RecordValidator:
    """Make a validator for records as hivemind packs them. It belongs to no run yet."""
    return RecordValidator(clock, hash_key=lambda key: DHTID.generate(key).to_bytes(), pack=MSGPackSerializer.dumps)


async def launch(
    known: Sequence[addresses.Node], *, options: Sequence[str], client_mode: bool, validator: RecordValidator,
    clock: Clock, must_join: bool = False,
) -> Kademlia:  # fmt: skip
    """Start p2pd and a node over it, and join the known nodes that answer. Cancellation leaves nothing behind.

    With `must_join` one of the known nodes, if there are any, has to answer. The call waits for an answer for a while,
    because these nodes may be starting at the same moment.

    Raises PeerUnavailable if, with must_join, none of the known nodes answers, or none that does can be joined, and
    OSError if p2pd cannot be started.
    """
    async with contextlib.AsyncExitStack() as undo:
        process = await launch_daemon(_P2PD, options)
        undo.push_async_callback(process.stop)
        p2p = await P2P.replicate(Multiaddr(process.control_address))
        undo.push_async_callback(p2p.shutdown)
        node = await _node_over(p2p, client_mode, validator)
        if must_join and known:
            enter = partial(_enter, p2p, node, known)
            await patiently(enter, clock, "a node of the DHT to join", final=addresses.Unjoinable)
        elif known:
            with contextlib.suppress(PeerUnavailable):
                await _enter(p2p, node, known)
        own = [] if client_mode else [str(address) for address in await p2p.get_visible_maddrs(latest=True)]
        undo.pop_all()
    return Kademlia(process, p2p, node, own, clock, client_mode=client_mode)


async def _node_over(p2p: Any, client_mode: bool, validator: RecordValidator) -> Any:
    """Make hivemind's node. It knows no other node yet, but answers those that find it."""
    node = await DHTNode.create(
        p2p=p2p,
        # The id stays the same after a restart. With a new id, others would see one peer as two nodes, store every
        # record there twice, and count the refusal of the second copy as an answer.
        node_id=DHTID.generate(str(p2p.peer_id)),
        client_mode=client_mode,
        record_validator=validator,
        # A cached record would hide records that were stored under its key later.
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
    )
    node.protocol.cache = NoCache()
    node.protocol.storage = BoundedStorage(validator)
    _bound(node.protocol.routing_table)
    return node


async def _enter(p2p: Any, node: Any, known: Sequence[addresses.Node]) -> None:
    """Join the known nodes that answer. Raises PeerUnavailable if none does."""
    faults = await asyncio.gather(*(_meet(p2p, node, other) for other in known))
    if None not in faults:
        raise addresses.cannot_join(known, [fault for fault in faults if fault is not None])
    # By this search the node and the nodes around it learn of each other.
    looking = asyncio.create_task(node.find_nearest_nodes([node.node_id]))
    await asyncio.wait({looking}, timeout=LOOK_AROUND_SECONDS)
    looking.cancel()


async def _meet(p2p: Any, node: Any, other: addresses.Node) -> str | None:
    """Introduce this node and another one to each other. Returns what went wrong, or None."""
    if (fault := await _connect(p2p, other)) is not None:
        return fault
    try:
        # With `validate` both nodes check that they reach each other, and that their clocks agree.
        met = await node.protocol.call_ping(_peer_id(other), validate=True)
    except ValidationError as error:
        return str(error)
    return None if met is not None else "it does not answer"


async def _connect(p2p: Any, known: addresses.Node) -> str | None:
    """Connect to a node, at the endpoint that answers first. Returns what went wrong, or None."""
    endpoints = [Multiaddr(addresses.split(address)[0]) for address in known]
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            # hivemind's P2P has no public method that gives p2pd a peer's address.
            await p2p._client.connect(_peer_id(known), endpoints)
    except (ControlFailure, EOFError, OSError, TimeoutError) as error:
        # Not the endpoints themselves: as text, hivemind refuses some names that libp2p would look up.
        logger.debug("cannot connect to %s: %s", ", ".join(known), error)
        return str(error)
    return None


def _peer_id(known: addresses.Node) -> Any:
    return PeerID.from_base58(addresses.split(known[0])[1])


def require_key_file(path: Path) -> None:
    """Unless the file exists, make it with a new libp2p key. Only this user can read it."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # hivemind makes the file private only after it has written the key, so the umask does it from the start.
    mask = os.umask(0o077)
    try:
        with replacing(path) as temporary:
            P2P.generate_identity(str(temporary))
    finally:
        os.umask(mask)


# -- bounds on what others may do to it --------------------------------------------------------------------------------


class NoCache(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """A cache that keeps nothing, for hivemind's node.

    Others may ask this node to cache records, and one that expires late would hide all that is stored under its key.
    """

    def store(self, *_: Any, **__: Any) -> bool:
        return False

    def store_subkey(self, *_: Any, **__: Any) -> bool:
        return False


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """A storage for hivemind's node that keeps only as much as the validator allows.

    hivemind's own storage keeps any number of records, and remembers every renewal of a record until the renewal
    expires.
    """

    def __init__(self, validator: RecordValidator) -> None:
        super().__init__()
        self._validator = validator

    def store(self, key: Any, value: bytes, expiration_time: float, subkey: str | None = None) -> bool:
        """Refuse a record without a subkey: no honest peer stores one."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: Any, subkey: str, value: bytes, expiration_time: float) -> bool:
        kept = self.get(key)
        former = kept.value.get(subkey) if kept is not None else None
        # hivemind would refuse a record that expires sooner, but would drop the kept record when the refused one
        # expires.
        if former is not None and former.expiration_time >= expiration_time:
            return False
        record = DHTRecord(key.to_bytes(), MSGPackSerializer.dumps(subkey), value, expiration_time)
        if not self._validator.has_room(record) or not super().store_subkey(key, subkey, value, expiration_time):
            return False
        for timed in (self, self.data[key].value):
            if len(timed.expiration_heap) > 2 * len(timed.data) + 64:
                timed.expiration_heap = sorted(timed.key_to_heap.values())
        return True

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._validator.forget(key.to_bytes())


def _bound(table: Any) -> None:
    """Make hivemind's routing table refuse made-up ids, and keep no more replacements in a bucket than nodes.

    A node's id has to follow from its key. Otherwise one node could have any number of ids.
    """
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
