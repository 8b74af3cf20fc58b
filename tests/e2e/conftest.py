"""Fixtures for all tests with real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.local.supervisor import Supervisor
from scripts.benches.shared.internet import Internet
from tests.support import preloaded
from tests.support.nat_swarm import NatSwarm


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Supervisor]:
    """Starts processes, and ends whatever is left of them."""
    with Supervisor(tmp_path / "logs", grace_seconds=0.0, spawn=preloaded.spawn) as children:
        yield children


@pytest.fixture
def internet() -> Iterator[Internet]:
    """An internet of network namespaces, for tests that need root."""
    with Internet() as internet:
        yield internet


@pytest.fixture
def swarm(tmp_path: Path, children: Supervisor) -> NatSwarm:
    """A swarm of two stages on that internet, without peers yet."""
    return NatSwarm(tmp_path, children, num_stages=2)
