"""A process that serves several blocks is a peer of each of them."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from peers.shared.stopping import leaves
from peers.stage_peer.own_state import OwnState
from swarm.audit.audit import audit
from swarm.averaging.averager import Averager
from swarm.config import RunConfig
from swarm.errors import NotReady
from swarm.types import Block, PeerState
from tests.support.chain import DILOCO, PATIENCE_SECONDS, SYNCHRONOUS, eventually
from tests.support.whole_swarm import WholeSwarm, whole_swarm

STEPS = 2


async def _train(swarm: WholeSwarm, *spans: Sequence[int]) -> list[float | None]:
    """Let peers with these spans train. Returns the losses of the steps."""
    async with asyncio.timeout(3 * PATIENCE_SECONDS):
        for span in spans:
            first, *others = span
            await swarm.start(first, *others)
        return [step.totals.loss for step in await swarm.train(STEPS)]


@pytest.mark.slow  # scripts/bench parity --spans compares them with one process.
async def test_spans_of_any_shape_take_the_same_steps(tmp_path: Path) -> None:
    losses: dict[str, list[float | None]] = {}
    shapes: dict[str, list[tuple[int, ...]]] = {
        "apart": [(0,), (1,), (2,)], "mixed": [(0, 1), (1, 2), (0, 1, 2)],
    }  # fmt: skip
    for name, spans in shapes.items():
        async with whole_swarm(SYNCHRONOUS, tmp_path / name, num_peers=()) as swarm:
            losses[name] = await _train(swarm, *spans)
        report = audit(swarm.logs)
        assert report.proven, report
    assert losses["mixed"] == pytest.approx(losses["apart"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("config", [SYNCHRONOUS, DILOCO])
async def test_a_process_is_announced_and_described_at_each_of_its_blocks(config: RunConfig, tmp_path: Path) -> None:
    async with whole_swarm(config, tmp_path / "events", num_peers=()) as swarm:
        await _train(swarm, (0, 1), (1,), (2,))
        span = swarm.peers[0]
        blocks = [span.servers[Block(stage)] for stage in (0, 1)]
        seconds = sum(block.stage.seconds_per_sample for block in blocks)
        for stage, block in enumerate(blocks):
            record, said = block.presence.record(), block.describe()
            assert (record.peer_id, record.stage, record.state) == (span.peer_id, stage, PeerState.SERVING)
            assert record.samples_per_second == pytest.approx(1 / seconds), "both share one compute thread"
            assert (said.stage, said.counters.forwards > 0) == (stage, True)
        states = [await member.snapshot() for member in (blocks[1].member, swarm.peers[1].servers[Block(1)].member)]
        if states[0].round == states[1].round:
            assert states[0].digest == states[1].digest


async def test_a_joiner_gets_the_state_of_all_its_blocks(tmp_path: Path) -> None:
    async with whole_swarm(SYNCHRONOUS, tmp_path / "events", num_peers=()) as swarm:
        await _train(swarm, (0, 1, 2))
        async with asyncio.timeout(PATIENCE_SECONDS):
            joiner = await swarm.start(1, 2)
        for block, served in joiner.servers.items():
            mine, theirs = await served.member.snapshot(), await swarm.peers[0].servers[block].member.snapshot()
            assert (mine.round, mine.digest) == (theirs.round, theirs.digest)
            assert mine.round == STEPS


async def test_a_process_that_lacks_the_state_of_a_later_block_leaves_the_first_one_with_nothing_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves block 0 while it waits for the state of block 1, which it does not get."""
    may_fail, arrives = asyncio.Event(), OwnState.arrive

    async def arrive(own: OwnState, averager: Averager) -> None:
        if averager.context.own.block == Block(1):
            await may_fail.wait()
            raise NotReady("it is not to be had")
        await arrives(own, averager)

    async with whole_swarm(SYNCHRONOUS, tmp_path / "events", num_peers=(1, 1, 1)) as swarm:
        monkeypatch.setattr(OwnState, "arrive", arrive)
        starting = asyncio.create_task(swarm.start(0, 1))
        await eventually(lambda: len(swarm.logs) == 4)
        newcomer = swarm.logs[-1]
        training = asyncio.create_task(swarm.train(STEPS))
        await eventually(lambda: '"accumulate"' in newcomer.read_text())
        may_fail.set()
        with pytest.raises(ExceptionGroup) as failure:
            await starting
        assert "it is not to be had" in str(next(leaves(failure.value)))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await training
    report = audit(swarm.logs)
    assert report.proven, report
    assert report.replayed == 0
    events = map(json.loads, newcomer.read_text().splitlines())
    assert [event["block"] for event in events if event["event"] == "leave"] == ["0"]
