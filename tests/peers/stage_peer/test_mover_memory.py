"""Stages for which a peer has no memory, before it serves them and while it does."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.shared import stopping
from peers.stage_peer import own_stage
from swarm.config import RunConfig
from swarm.errors import Fatal
from swarm.events import Leave
from swarm.model.stages import build_stage
from swarm.stage.admission import TRIES
from swarm.training.samples import Microbatch
from swarm.types import Block, PeerState
from tests.peers.stage_peer.movers import ROUND, LocalPeer
from tests.support.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40.00 GiB\nand much more to say"), "40.00 GiB"),
    ],
)
async def test_a_stage_that_does_not_fit_is_one_line(
    config: RunConfig, store: MemoryStore, trained: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, error: Exception, reason: str,
) -> None:  # fmt: skip
    """A peer that moves there goes back."""

    def no_memory(run: RunConfig, block: Block, **more: Any) -> torch.nn.Module:
        if block.stage == 1:
            raise error
        return build_stage(run, block, **more)

    async with (
        LocalPeer(config, store, resume=trained).running(0),
        LocalPeer(config, store, resume=trained).running(1),
        LocalPeer(config, store, resume=trained).running(0) as peer,
    ):
        monkeypatch.setattr(own_stage, "build_stage", no_memory)
        peer.rebalancer.orders.put_nowait(1)
        assert await peer.next_served() == 0
    assert f"stage 1 does not fit on cpu (no room for {reason}): take more stages" in caplog.text


async def test_a_peer_that_has_no_memory_for_one_microbatch_leaves_in_good_order_and_says_why(
    config: RunConfig, store: MemoryStore, trained: Path
) -> None:
    peer = LocalPeer(config, store, resume=trained)

    async def serve() -> None:
        async with peer.running(0):
            assert peer.server is not None
            stage = peer.server.stage
            size, first = config.data.microbatch_size, ROUND * config.microbatches_per_round
            microbatch = Microbatch(index=first, round=ROUND, num_samples=size)
            for _ in range(1 + TRIES):
                slot = stage.admission.admit(microbatch)
                stage.admission.ran_out_of_memory(MemoryError(), slot)
                stage.admission.leave(slot)
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(20.0):
            await serve()
    (fault,) = set(stopping.leaves(raised.value))
    assert isinstance(fault, Fatal)
    assert str(fault).startswith("stage 0 ran out of memory at 3 microbatches in a row")
    assert Leave() in peer.log.events
    record = await peer.record(0)
    assert record is not None
    assert record.state is PeerState.LEAVING
