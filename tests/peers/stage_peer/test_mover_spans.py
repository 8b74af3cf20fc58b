"""A peer that moves from some stages to others keeps serving those that it has in both."""

import dataclasses
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from peers.stage_peer import mover
from swarm.config import RunConfig
from swarm.events import Join, Leave
from swarm.types import Block, ClaimState, PeerState
from tests.peers.stage_peer.movers import ROUND, LocalPeer, train_all
from tests.support.chain import eventually
from tests.support.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("quick")
FIRST, LAST = (Block(0),), (Block(1),)
BOTH = FIRST + LAST


def _events(peer: LocalPeer, block: Block) -> list[type]:
    """Whether the peer joined and left a block, in order."""
    found = zip(peer.log.events, peer.log.blocks, strict=True)
    return [type(event) for event, of in found if of == block and isinstance(event, (Join, Leave))]


async def test_a_peer_takes_a_stage_beside_its_own_and_gives_one_up_again(
    config: RunConfig, store: MemoryStore, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody trains on, so the round does not end.
    monkeypatch.setattr(mover, "QUIET_SECONDS", 0.5)
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    async with (
        LocalPeer(config, store, resume=trained).running(0) as holder,
        LocalPeer(config, store, resume=trained).running(1),
        LocalPeer(config, store, resume=nothing).running(1) as peer,
    ):
        kept = peer.server
        assert kept is not None
        peer.rebalancer.orders.put_nowait(BOTH)
        assert await peer.next_served() == 0
        assert peer.whole is not None
        assert peer.whole.blocks[Block(1)] is kept
        assert kept.presence.state is PeerState.SERVING
        mine, (number, theirs) = await peer.whole.blocks[Block(0)].member.snapshot(), await holder.state()
        assert mine.round == number == ROUND
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.tensors.items())
        records = [await peer.record(stage) for stage in (0, 1)]
        assert [(r.state, r.moves) for r in records if r] == [(PeerState.SERVING, 1)] * 2
        assert [claim.state for claim in await peer.directory.claims() if claim.peer_id == peer.peer_id] == [
            ClaimState.WITHDRAWN
        ]
        # Both compute: a microbatch passes from one block to the other within the process.
        first = ROUND * config.microbatches_per_round
        await eventually(lambda: any(r.peer_id == peer.peer_id for r in peer.known.peers(Block(1))))
        await train_all(config, [peer], range(first, first + 4))
        peer.rebalancer.orders.put_nowait(FIRST)
        assert await peer.next_served() == 0
        records = [await peer.record(stage) for stage in (0, 1)]
        assert [r.state for r in records if r] == [PeerState.SERVING, PeerState.LEAVING]
        assert list(peer.whole.blocks) == [Block(0)]
    assert _events(peer, Block(1)) == [Join, Leave]
    assert _events(peer, Block(0)) == [Join, Leave]


async def test_a_peer_that_cannot_begin_at_a_further_stage_stays_at_its_own(
    config: RunConfig, store: MemoryStore, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(LocalPeer(config, store, resume=trained).running(1))
        peer = await stack.enter_async_context(LocalPeer(config, store, resume=nothing).running(1))
        kept = peer.server
        async with LocalPeer(config, store, resume=trained).running(0):
            pass
        # The only holder of stage 0 is gone.
        peer.rebalancer.orders.put_nowait(BOTH)
        assert await peer.next_served() == 1
        assert peer.whole is not None
        assert peer.whole.blocks == {Block(1): kept}
        record = await peer.record(1)
        assert record is not None
        assert (record.state, record.moves) == (PeerState.SERVING, 0)
        assert await peer.record(0) is None
    assert "cannot begin at stages 0 to 1: " in caplog.text
    assert _events(peer, Block(1)) == [Join, Leave]


async def test_a_peer_of_a_path_goes_to_another_variant_of_one_stage(
    config: RunConfig, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "QUIET_SECONDS", 0.5)
    config = dataclasses.replace(config, stages=dataclasses.replace(config.stages, variants=(1, 2)))
    async with (
        LocalPeer(config, store, resume=tmp_path).running(0, 1),
        LocalPeer(config, store, resume=tmp_path).running(0, 1) as peer,
    ):
        kept = peer.server
        peer.rebalancer.orders.put_nowait((Block(0), Block(1, 1)))
        assert await peer.next_served() == 0
        assert peer.whole is not None
        assert list(peer.whole.blocks) == [Block(0), Block(1, 1)]
        assert peer.whole.blocks[Block(0)] is kept
        records = [await peer.record(block) for block in (Block(0), Block(1, 1))]
        assert [(r.state, r.moves) for r in records if r] == [(PeerState.SERVING, 1)] * 2
    assert _events(peer, Block(1)) == _events(peer, Block(1, 1)) == [Join, Leave]
