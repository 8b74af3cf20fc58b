"""A run of two stages, whose first peers begin with checkpoints; movers starts them."""

from pathlib import Path

import pytest

from peers.stage_peer import mover, others
from swarm.config import RunConfig
from swarm.machine.clock import SystemClock
from tests.checkpoint.states import cut, write_cut
from tests.peers.stage_peer.movers import ROUND
from tests.support.memory_store import MemoryStore


@pytest.fixture
def config() -> RunConfig:
    return cut(2)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(SystemClock())


@pytest.fixture
def trained(tmp_path: Path, config: RunConfig) -> Path:
    """Checkpoints of both stages, with which the first peers begin."""
    folder = tmp_path / "trained"
    folder.mkdir()
    write_cut(folder, config, ROUND)
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(mover, "COMMIT_SECONDS", 0.5)
    monkeypatch.setattr(mover, "LAST_QUIET_SECONDS", 0.3)
    monkeypatch.setattr(others, "SETTLE_SECONDS", 1.0)
