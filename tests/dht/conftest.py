"""Real DHT nodes, with p2pd processes, which end with the tests of a file."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from swarm.dht import node as dht_node
from swarm.dht.node import DhtNode
from swarm.machine.clock import SystemClock
from tests.dht.nodes import KEYS, Start, stranger_at

if TYPE_CHECKING:
    from tests.support.dht_stranger import Stranger


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """A function that starts nodes on the loopback, which are ended after the tests of a file."""
    nodes: list[DhtNode] = []

    def start_one(initial_peers: list[str] | None = None, **options: object) -> DhtNode:
        arguments = {"clock": SystemClock(), "host": "127.0.0.1", "initial_peers": initial_peers or [], **options}
        nodes.append(dht_node.start(**arguments))  # type: ignore[arg-type]  # Only what the tests pass on.
        nodes[-1].belong_to(KEYS, None)
        return nodes[-1]

    yield start_one
    for node in nodes:
        node.shutdown()


@pytest.fixture(scope="module")
def first(start: Start) -> DhtNode:
    return start()


@pytest.fixture(scope="module")
def second(start: Start, first: DhtNode) -> DhtNode:
    return start(first.addresses())


@pytest.fixture(scope="module")
def client(start: Start, first: DhtNode) -> DhtNode:
    return start(first.addresses(), client_mode=True)


@pytest.fixture(scope="module")
def careless(first: DhtNode) -> Iterator["Stranger"]:
    """Let nodes send any record."""
    with stranger_at(first) as stranger:
        yield stranger
