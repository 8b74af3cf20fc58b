"""The nodes that keep a key, over hivemind's own tables and a scripted network in one process, on manual time."""

from collections.abc import Collection
from typing import Any

import pytest

from swarm.dht.keepers import SEARCH_SECONDS, Keepers
from tests.support.manual_clock import ManualClock

KEY, NUM_REPLICAS = "notes", 5


class Node:
    """The part of hivemind's DHTNode that keepers needs; it is its own DHTProtocol as well."""

    def __init__(self, network: "Network", name: str) -> None:
        from hivemind.dht.node import Blacklist
        from hivemind.dht.routing import DHTID, RoutingTable
        from hivemind.dht.storage import DHTLocalStorage
        from hivemind.utils import MSGPackSerializer

        self.node_id: Any = DHTID.generate(name)
        self.peer_id = name
        self.protocol = self
        self.num_replicas = NUM_REPLICAS
        self.serializer = MSGPackSerializer
        self.routing_table = RoutingTable(self.node_id, 20, 5)
        self.storage = DHTLocalStorage()
        self.blacklist = Blacklist(base_time=5.0, backoff_rate=2.0)
        self.is_wary = True
        self.num_searches = 0
        self._network = network

    def _validate_record(self, key: bytes, subkey: bytes, value: bytes, expiration: float) -> bool:
        return self.is_wary

    def _filter_blacklisted(self, peers: Any) -> Any:
        return {node_id: peer_id for node_id, peer_id in peers.items() if peer_id not in self.blacklist}

    async def find_nearest_nodes(self, queries: Collection[Any], k_nearest: int, exclude_self: bool) -> Any:
        self.num_searches += 1
        return {query: self._network.nearest(query, k_nearest, self) for query in queries}

    async def _call_find_with_blacklist(self, peer_id: str, keys: Collection[Any]) -> Any:
        self._network.asked.append(peer_id)
        node = self._network.nodes.get(peer_id)
        if node is None or peer_id in self.blacklist:
            self.blacklist.register_failure(peer_id)
            return None
        return {key: (node.storage.get(key), self._network.nearest(key, 20, self)) for key in keys}

    async def call_store(
        self, peer_id: str, keys: list[Any], values: list[bytes], expirations: list[float], subkeys: list[str]
    ) -> list[bool] | None:
        if (node := self._network.nodes.get(peer_id)) is None:
            return None
        entries = zip(keys, values, expirations, subkeys, strict=True)
        return [node.is_wary and node.storage.store_subkey(k, s, v, e) for k, v, e, s in entries]


class Network:
    """All nodes, which know each other."""

    def __init__(self, size: int) -> None:
        self.nodes: dict[str, Node] = {}
        self.asked: list[str] = []
        for number in range(size):
            self.add(f"node {number}")

    def add(self, name: str) -> Node:
        node = self.nodes[name] = Node(self, name)
        return node

    def nearest(self, key_id: Any, count: int, without: Node) -> dict[Any, str]:
        others = (node for node in self.nodes.values() if node is not without)
        by_distance = sorted(others, key=lambda node: key_id.xor_distance(node.node_id))
        return {node.node_id: node.peer_id for node in by_distance[:count]}

    def who_have(self, key_id: Any) -> set[str]:
        return {name for name, node in self.nodes.items() if node.storage.get(key_id) is not None}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def key_id() -> Any:
    from hivemind.dht.routing import DHTID

    return DHTID.generate(KEY)


def _client(network: Network, clock: ManualClock) -> tuple[Node, Keepers]:
    node = Node(network, "client")
    return node, Keepers(node, KEY, clock, client_mode=True)


async def test_a_store_goes_to_the_nearest_and_readings_take_turns(clock: ManualClock, key_id: Any) -> None:
    network = Network(12)
    node, keepers = _client(network, clock)
    far = 2.0**40
    assert await keepers.store("a", b"1", far) == (True, True)
    nearest = set(network.nearest(key_id, NUM_REPLICAS, node).values())
    assert network.who_have(key_id) == nearest
    # One of the nodes has missed this record, and is the only one that does not show it.
    assert await keepers.store("b", b"2", far) == (True, True)
    del network.nodes[min(nearest)].storage.data[key_id]
    for _ in range(NUM_REPLICAS):
        found = await keepers.read()
        assert found == ({} if network.asked[-1] == min(nearest) else {"a": (b"1", far), "b": (b"2", far)})
    assert sorted(network.asked) == sorted(nearest)
    assert node.num_searches == 1


async def test_a_node_keeps_what_is_near_to_it_itself(clock: ManualClock, key_id: Any) -> None:
    network = Network(3)
    node = network.nodes["node 1"]
    keepers = Keepers(node, KEY, clock, client_mode=False)
    assert await keepers.store("a", b"1", 2.0**40) == (True, True)
    assert network.who_have(key_id) == set(network.nodes)
    # Another node is asked all the same, since this node alone does not know whether others are left.
    network.nodes["node 0"].storage.store_subkey(key_id, "b", node.serializer.dumps(b"2"), 2.0**40)
    found = [await keepers.read() for _ in range(2)]
    assert sorted(network.asked) == ["node 0", "node 2"]
    for asked, answer in zip(network.asked, found, strict=True):
        assert answer == {"a": (b"1", 2.0**40)} | ({"b": (b"2", 2.0**40)} if asked == "node 0" else {})


async def test_a_liar_cannot_name_itself_under_several_ids(
    clock: ManualClock, key_id: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(12)
    node, keepers = _client(network, clock)
    assert await keepers.store("a", b"1", 2.0**40) == (True, True), "it knows the honest ones"
    liar, *_ = honest = list(network.nearest(key_id, NUM_REPLICAS, node).values())

    def lie(key: Any, count: int, without: Node) -> dict[Any, str]:
        return {type(key)(key ^ number): liar for number in range(1, count + 1)}

    monkeypatch.setattr(network, "nearest", lie)
    for _ in range(2 * NUM_REPLICAS):
        assert await keepers.read() is not None
    assert sorted(set(network.asked)) == sorted(honest)


async def test_who_does_not_answer_is_told_of_and_replaced(clock: ManualClock, key_id: Any) -> None:
    network = Network(12)
    node, keepers = _client(network, clock)
    assert await keepers.store("a", b"1", 2.0**40) == (True, True)
    first, *rest = network.nearest(key_id, NUM_REPLICAS, node).values()
    del network.nodes[first]
    found = [await keepers.read() for _ in range(2 * NUM_REPLICAS)]
    assert found.count(None) == 1
    assert [asked == first for asked in network.asked] == [answer is None for answer in found]
    # The newcomer among the nodes has nothing yet.
    assert {"a": (b"1", 2.0**40)} in found
    del network.nodes[rest[0]]
    assert await keepers.store("a", b"2", 2.0**41) == (True, False)
    assert await keepers.store("a", b"3", 2.0**42) == (True, True)
    assert network.who_have(key_id) >= set(network.nearest(key_id, NUM_REPLICAS, node).values())


async def test_newcomers_are_learnt_from_answers_and_from_time_to_time(clock: ManualClock, key_id: Any) -> None:
    network = Network(2)
    node, keepers = _client(network, clock)
    assert await keepers.store("a", b"1", 2.0**40) == (True, True)
    for number in range(2, 12):
        network.add(f"node {number}")
    # A node that is asked names its neighbours.
    await keepers.read()
    assert await keepers.store("a", b"2", 2.0**41) == (True, True)
    nearest = set(network.nearest(key_id, NUM_REPLICAS, node).values())
    assert network.who_have(key_id) >= nearest
    assert node.num_searches == 1
    # A node that only stores searches for newcomers as well.
    other, stores = _client(network, clock)
    await stores.store("b", b"1", 2.0**40)
    for number in range(12, 40):
        network.add(f"node {number}")
    clock.advance(SEARCH_SECONDS + 1)
    await stores.store("c", b"1", 2.0**40)
    assert network.who_have(key_id) >= set(network.nearest(key_id, NUM_REPLICAS, other).values())
    assert other.num_searches == 2


async def test_the_others_tell_whether_a_record_is_taken(clock: ManualClock) -> None:
    """This node would take the record, for example because its own clock is wrong."""
    network = Network(4)
    keepers = Keepers(network.nodes["node 0"], KEY, clock, client_mode=False)
    for name in ("node 1", "node 2", "node 3"):
        network.nodes[name].is_wary = False
    assert await keepers.store("a", b"1", 2.0**40) == (False, True)
    # It is enough that one node takes the record, since the others may have it already.
    network.nodes["node 2"].is_wary = True
    assert await keepers.store("a", b"2", 2.0**41) == (True, True)


async def test_who_was_handed_the_record_already_has_not_refused_it(clock: ManualClock, key_id: Any) -> None:
    """A newcomer near the key is given all records that are kept there, before this node sends it anything."""
    network = Network(2)
    keepers = Keepers(network.nodes["node 0"], KEY, clock, client_mode=False)
    other = network.nodes["node 1"]
    other.storage.store_subkey(key_id, "a", other.serializer.dumps(b"1"), 2.0**40)
    assert await keepers.store("a", b"1", 2.0**40) == (True, True)
    other.storage.store_subkey(key_id, "a", other.serializer.dumps(b"2"), 2.0**42)
    assert await keepers.store("a", b"3", 2.0**41) == (False, True), "it has a later one"
