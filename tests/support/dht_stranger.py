"""A node of the DHT that misbehaves in ways in which our own nodes never do."""

from collections.abc import Sequence
from typing import Any, Self

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.p2p import PeerID
from hivemind.proto.dht_pb2 import NodeInfo

from swarm.dht import kademlia
from swarm.dht.kademlia import Kademlia
from swarm.dht.known_records import Found
from swarm.dht.launcher import CLIENT_OPTIONS, LoopThread
from swarm.machine.clock import SystemClock

Sealed = tuple[str, bytes]
"""A subkey, and the record under it."""


class Stranger:
    """A node that joins at an address, and ends with its `with` block. It sends, stores and believes anything.

    Attributes:
        dht: its node.
    """

    def __init__(self, address: str, *, is_client: bool = True) -> None:
        listening = CLIENT_OPTIONS if is_client else ["-dhtServer=1", "-hostAddrs=/ip4/127.0.0.1/tcp/0"]
        clock = SystemClock()
        validator = kademlia.new_validator(clock)
        launch = kademlia.launch(
            [(address,)], options=listening, client_mode=is_client, validator=validator, clock=clock, must_join=True
        )
        self._thread = LoopThread("stranger")
        self.dht: Kademlia = self._thread.run(launch)
        self.dht.node.protocol.record_validator = None
        self.dht.node.protocol.storage = DHTLocalStorage()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.run(self.dht.stop())
        self._thread.close()

    def send(self, address: str, key: str, records: Sequence[Sealed], expiration: float, **options: Any) -> list[bool]:
        """Store records at the node with this address, and nowhere else. Return for each record whether the node
        accepted it."""
        protocol = self.dht.node.protocol
        answers: list[bool] | None = self._thread.run(
            protocol.call_store(
                _peer_id(address), len(records) * [DHTID.generate(key)],
                [protocol.serializer.dumps(value) for _, value in records], expiration,
                [subkey for subkey, _ in records], **options,
            )
        )  # fmt: skip
        assert answers is not None
        return answers

    def ask(self, address: str, key: str) -> Found:
        """The records that the node with this address has under a key."""
        protocol, key_id = self.dht.node.protocol, DHTID.generate(key)
        reply = self._thread.run(protocol.call_find(_peer_id(address), [key_id]))
        kept = reply[key_id][0]
        loads = protocol.serializer.loads
        return {} if kept is None else {name: (loads(at.value), at.expiration_time) for name, at in kept.value.items()}

    def neighbours(self, address: str) -> list[str]:
        """The libp2p ids in the routing table of the node with this address. One is listed once for every Kademlia id
        under which it appears."""
        beside = DHTID.generate("anywhere")
        reply = self._thread.run(self.dht.node.protocol.call_find(_peer_id(address), [beside]))
        return [str(peer_id) for peer_id in reply[beside][1].values()]

    def greet_as(self, name: str, address: str) -> None:
        """Tell the node with this address that this node's id is the one that follows from `name`."""
        self.dht.node.protocol.node_info = NodeInfo(node_id=DHTID.generate(name).to_bytes())
        self._thread.run(self.dht.node.protocol.call_ping(_peer_id(address)))

    def store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
        return self._thread.run(self.dht.store(key, subkey, value, expiration))

    def store_bare(self, key: str, value: bytes, expiration: float) -> bool:
        """Store a value that is no dictionary, as hivemind may."""
        return bool(self._thread.run(self.dht.node.store(key, value, expiration, exclude_self=True)))

    def keep(self, key: str, subkey: str, value: bytes, expiration: float) -> None:
        """Store a record in this node itself, so that others find it here."""
        protocol = self.dht.node.protocol
        protocol.storage.store_subkey(DHTID.generate(key), subkey, protocol.serializer.dumps(value), expiration)


def _peer_id(address: str) -> Any:
    return PeerID.from_base58(address.split("/p2p/")[1])
