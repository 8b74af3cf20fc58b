"""Two paths through one swarm of real peers and a trainer: one loses its peers for a while, and the other goes on."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from swarm.audit.audit import audit
from swarm.config import RoundsConfig, StagesConfig
from swarm.types import Block
from tests.support.chain import DILOCO, eventually
from tests.support.whole_swarm import whole_swarm

CONFIG = dataclasses.replace(
    DILOCO,
    stages=StagesConfig(num_stages=3, variants=(1, 2, 2), paths=((0, 0, 0), (0, 1, 1))),
    rounds=RoundsConfig(setting="diloco", round_samples=16, inner_batch_samples=4),
)
STEPS, WITHOUT = 14, 6


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_path_that_lost_its_peers_stands_still_and_the_other_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("swarm.hop.retries.EMPTY_SECONDS", 1.0)
    monkeypatch.setattr("tests.support.chain.PATIENCE_SECONDS", 60.0)
    async with whole_swarm(CONFIG, tmp_path / "events", num_peers=(1,)) as swarm:
        for stage, path in ((1, 0), (2, 0), (1, 1)):
            await swarm.start(stage, path=path)
        victim = await swarm.start(2, path=1)

        def round_of(block: Block) -> int:
            return max((peer.servers[block].stage.round for peer in swarm.peers if block in peer.servers), default=0)

        training = asyncio.create_task(swarm.train(STEPS))
        await eventually(lambda: min(map(round_of, CONFIG.blocks)) >= 1)
        lost_at = max(map(round_of, CONFIG.blocks))
        await victim.kill()
        swarm.peers.remove(victim)
        # Each block on the other path goes through round after round, the shared one with samples of this path alone.
        await eventually(lambda: min(round_of(block) for block in CONFIG.blocks_of(0)) >= lost_at + WITHOUT)
        assert "path 1 stands still: " in caplog.text
        assert not training.done()
        swarm.start_over = True
        await swarm.start(2, path=1)
        back_at = round_of(Block(2, 1))
        await eventually(lambda: round_of(Block(2, 1)) > back_at + 1)
        steps = await training
    reports = [step.report for step in steps if step.report is not None]
    assert len(steps) == STEPS
    assert reports
    assert [report.run_samples for report in reports] == sorted(report.run_samples for report in reports)
    report = audit(swarm.logs)
    assert report.findings.violations == []
    assert report.findings.duplicates == 0
    lost = {Block(stage.stage, stage.variant): stage.lost for stage in report.stages}
    assert lost[Block(1)] == lost[Block(2)] == 0, "nothing of the path that went on"
