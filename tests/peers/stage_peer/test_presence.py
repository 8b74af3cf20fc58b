"""What a peer says of itself where no node of the DHT listens."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from peers.shared.network import Membership
from peers.stage_peer.presence import Presence
from swarm.config import ModelConfig, RunConfig, StagesConfig
from swarm.credentials.identity import generate
from swarm.types import PeerRecord, PeerState
from tests.support.memory_store import MemoryStore
from tests.support.virtual_time import LoopClock, run

CONFIG = RunConfig(
    model=ModelConfig(num_layers=1, d_model=32, num_heads=2, vocab_size=64), stages=StagesConfig(num_stages=1)
)


class _OtherRunsStore(MemoryStore):
    """A DHT whose only other node is another run's, for a while."""

    refuses = True

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
        return not self.refuses and await super().store(key, subkey, value, expiration)


class _Present(Presence):
    """A peer whose stage has nothing to say."""

    def __init__(self, membership: Membership) -> None:
        nothing: Any = SimpleNamespace(round=0)
        super().__init__(membership, nothing, nothing, nothing, nothing, nothing)
        self.membership = membership

    def record(self) -> PeerRecord:
        peer_id, now = self.membership.peer_id, self.membership.clock.time()
        return PeerRecord(
            peer_id=peer_id, announced_at=now, stage=0, endpoint="192.0.2.1:5001", state=PeerState.SERVING
        )


def test_a_peer_that_nobody_lists_says_so_once_and_then_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def scene() -> None:
        clock = LoopClock()
        store = _OtherRunsStore(clock)
        member = Membership.enter(CONFIG, store, generate(), clock, insecure=True)
        tasks = [asyncio.create_task(_Present(member).keep_announced()), asyncio.create_task(member.waits.run(clock))]
        await clock.sleep(180.0)
        lines = [(record.levelno, record.getMessage()) for record in caplog.records]
        assert [line for level, line in lines if level >= logging.WARNING] == [
            line for _, line in lines if line.startswith("this peer is not announced: no other node of the DHT took")
        ]
        waiting = [line for _, line in lines if line.startswith("waiting for a node of the DHT that takes this peer's")]
        assert len(lines) == 1 + len(waiting)
        assert 3 <= len(waiting) <= 6
        caplog.clear()
        store.refuses = False
        await clock.sleep(60.0)
        assert [record.getMessage() for record in caplog.records] == ["this peer is announced again"]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    run(scene())
