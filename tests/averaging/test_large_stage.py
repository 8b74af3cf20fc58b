"""Rounds of a stage whose peers know only some of each other: with real peers, and keys that are split soon."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm.audit import history
from swarm.audit.audit import audit
from swarm.config import RunConfig
from swarm.dht import split_key
from swarm.dht.split_key import SplitKey
from swarm.events import Commit
from swarm.types import PeerRecord
from tests.support.chain import DILOCO, SYNCHRONOUS, eventually
from tests.support.whole_swarm import WholePeer, whole_swarm

STEPS, NUM_PEERS = 4, 8


def _num_commits(log: Path) -> int:
    return sum(isinstance(line.event, Commit) for line in history.read(log))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config", [SYNCHRONOUS, DILOCO], ids=["synchronous", "diloco"])
async def test_all_take_part_in_the_rounds_of_a_stage_of_which_each_knows_a_part(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"GO_DOWN": 2, "SPLIT": 3, "KEPT": 4, "FEW": 1, "NUM_HEIRS": 1, "WORK_PER_POINT": 1}
    for name, value in {**small, "UPPER_SECONDS": 2.0, "SOON_SECONDS": 0.5, "FIRST_SECONDS": 0.5}.items():
        monkeypatch.setattr(split_key, name, value)
    monkeypatch.setattr("tests.support.chain.PATIENCE_SECONDS", 200.0)
    known, sample = list[int](), SplitKey.sample

    async def counted(self: SplitKey, **options: Any) -> list[PeerRecord]:
        found = await sample(self, **options)
        known.append(len(found) if options["is_own"] and not options["leads"] else NUM_PEERS)
        return found

    monkeypatch.setattr(SplitKey, "sample", counted)
    async with whole_swarm(config, tmp_path / "events", num_peers=(NUM_PEERS, 1, 1)) as swarm:

        def members() -> list[WholePeer]:
            return sorted((peer for peer in swarm.peers if peer.stage == 0), key=lambda peer: peer.peer_id)

        await eventually(lambda: sum(number < NUM_PEERS - 1 for number in known[-10:]) > 1)
        training = asyncio.create_task(swarm.train(STEPS))
        last, first = members()[-1], members()[0]
        await eventually(lambda: last.server is not None and last.server.stage.round >= 1)
        # The leader dies, and another peer, which knew only some of the others, takes over.
        await first.kill()
        await training

        def rounds() -> list[int]:
            return [peer.server.stage.round for peer in members() if peer is not first and peer.server is not None]

        # A slow member may have been left out of a round, and be on its way to the others.
        await eventually(lambda: min(rounds()) >= STEPS - 1)
        assert len(rounds()) == NUM_PEERS - 1
    report = audit(swarm.logs)
    assert report.findings.violations == []
    assert report.findings.digests_compared > NUM_PEERS
    of_members = [path for path in swarm.logs if path.name.endswith("-peer-0.jsonl")]
    assert all(_num_commits(path) > 0 for path in of_members)
