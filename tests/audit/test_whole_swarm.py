"""The audit over what real stage peers and trainers did, and over copies of their logs that were tampered with."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.audit import history
from swarm.audit.audit import Report, audit
from swarm.config import RunConfig
from swarm.events import Accumulate, Commit
from tests.audit.honest import Lines, edit
from tests.support.chain import DILOCO, LORA, SYNCHRONOUS, eventually
from tests.support.whole_swarm import whole_swarm

STEPS = 5


def _holds_some_of_a_later_round(log: Path) -> bool:
    events = [line.event for line in history.read(log)]
    commits = [number for number, event in enumerate(events) if isinstance(event, Commit)]
    return bool(commits) and any(isinstance(event, Accumulate) for event in events[commits[0] :])


@pytest.mark.parametrize(
    "config",
    [pytest.param(SYNCHRONOUS, marks=pytest.mark.slow), DILOCO, pytest.param(LORA, marks=pytest.mark.slow)],
    ids=["synchronous", "diloco", "synchronous with adapters"],
)
async def test_a_run_is_proven_and_copies_that_were_tampered_with_are_not(config: RunConfig, tmp_path: Path) -> None:
    async with whole_swarm(config, tmp_path / "events", num_peers=(2, 2, 1)) as swarm:
        victim = next(peer for peer in swarm.peers if peer.stage == 1)
        log = next(path for path in swarm.logs if path.name.endswith("-peer-1.jsonl"))
        training = asyncio.create_task(swarm.train(STEPS))
        await eventually(lambda: _holds_some_of_a_later_round(log))
        await victim.kill()
        assert not training.done()
        await swarm.start(1)
        await training
    report = audit(swarm.logs)
    assert report.findings.violations == []
    assert report.rounds_committed >= STEPS
    assert (report.findings.duplicates, report.findings.missing, report.findings.digests_differing) == (0, 0, 0)
    assert report.findings.digests_compared > STEPS
    synchronous = config.rounds.synchronous
    if synchronous:
        assert report.lost_share == 0.0

    def tampered(change: Callable[[Lines], Lines | None]) -> Report:
        """The audit of copies of the files, with that of the last stage's peer changed."""
        copies = tmp_path / "copies"
        shutil.rmtree(copies, ignore_errors=True)
        shutil.copytree(tmp_path / "events", copies)
        (path,) = copies.glob("*-peer-2.jsonl")
        edit(path, change)
        return audit(sorted(copies.iterdir()))

    def index_of(lines: Lines, name: str) -> int:
        return next(number for number, line in enumerate(lines) if line["event"] == name)

    def twice(lines: Lines) -> Lines:
        return [lines[0], lines[1], lines[index_of(lines, "accumulate")], *lines[2:]]

    def less(lines: Lines) -> Lines:
        lost = lines[index_of(lines, "accumulate")]["microbatch"]
        return [line for line in lines if line.get("microbatch") != lost]

    report = tampered(twice)
    assert report.findings.duplicates == 1
    assert any("counts more than once" in line and "stage 2" in line for line in report.findings.violations)
    report = tampered(less)
    assert any("samples" in line and "stage 2" in line for line in report.findings.violations)
    assert report.findings.missing == synchronous
    report = tampered(lambda lines: lines[index_of(lines, "commit")].update(lineage="another") or lines)
    assert not report.proven
