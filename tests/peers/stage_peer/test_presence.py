"""What a peer says of itself where no node of the DHT listens."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from peers.reach.listen import Announced
from peers.shared.network import Membership
from peers.stage_peer.own_process import KEPT_SECONDS, LoopLag
from peers.stage_peer.presence import Presence
from swarm.config import ModelConfig, RunConfig, StagesConfig
from swarm.credentials.identity import generate
from swarm.types import PeerRecord, PeerState
from tests.support.memory_store import MemoryStore
from tests.support.virtual_time import LoopClock, in_virtual_time, virtual_loop

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
        nothing: Any = SimpleNamespace(round=0, announced=Announced())
        super().__init__(membership, nothing, nothing, nothing, nothing, nothing)
        self.membership = membership

    def record(self) -> PeerRecord:
        peer_id, now = self.membership.peer_id, self.membership.clock.time()
        return PeerRecord(
            peer_id=peer_id, announced_at=now, stage=0, endpoint="192.0.2.1:5001", state=PeerState.SERVING
        )


@in_virtual_time
async def test_a_peer_that_nobody_lists_says_at_growing_intervals_what_it_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    clock = LoopClock()
    store = _OtherRunsStore(clock)
    member = Membership.enter(CONFIG, store, generate(), clock, insecure=True)
    tasks = [asyncio.create_task(_Present(member).keep_announced()), asyncio.create_task(member.waits.run(clock))]
    await clock.sleep(180.0)
    refused, *waiting = caplog.messages
    assert refused.startswith("this peer is not announced: no other node of the DHT took")
    assert caplog.records[0].levelno == logging.WARNING
    assert all(line.startswith("waiting for a node of the DHT that takes this peer's") for line in waiting)
    assert 3 <= len(waiting) <= 6
    caplog.clear()
    store.refuses = False
    await clock.sleep(60.0)
    assert caplog.messages == ["this peer is announced again"]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@in_virtual_time
async def test_the_longest_hold_of_the_loop_is_known_for_a_minute_or_two() -> None:
    lag = LoopLag(LoopClock())
    measuring = asyncio.create_task(lag.run())
    await asyncio.sleep(10.0)
    assert lag.seconds == pytest.approx(0.0, abs=1e-6)
    for seconds in (0.3, 0.8, 0.5):
        virtual_loop().advance(seconds)  # This imitates a callback that computes for this time.
        await asyncio.sleep(1.0)
    assert lag.seconds == pytest.approx(0.8, abs=0.02)
    await asyncio.sleep(KEPT_SECONDS - 20.0)
    assert lag.seconds == pytest.approx(0.8, abs=0.02)
    await asyncio.sleep(2 * KEPT_SECONDS)
    assert lag.seconds == pytest.approx(0.0, abs=1e-6)
    measuring.cancel()
