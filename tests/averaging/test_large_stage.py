"""Rounds of a stage whose peers know only some of each other: with real peers, and keys that are split soon."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from swarm.audit import history
from swarm.audit.audit import audit
from swarm.averaging.participant import Participant
from swarm.config import AveragingConfig, RunConfig
from swarm.dht import split_key
from swarm.dht.split_key import SplitKey
from swarm.events import Commit
from swarm.rpc.v1 import averaging_pb2 as pb
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


IN_PAIRS = dataclasses.replace(
    DILOCO,
    model=dataclasses.replace(DILOCO.model, num_layers=6),
    optimizer=dataclasses.replace(DILOCO.optimizer, learning_rate=1e-3),
    rounds=dataclasses.replace(DILOCO.rounds, round_samples=48, inner_batch_samples=2),
    averaging=AveragingConfig(group_size=2),
)
OTHERS = {
    "plain": IN_PAIRS,
    "tied": dataclasses.replace(IN_PAIRS, model=dataclasses.replace(IN_PAIRS.model, tied_embeddings=True)),
    "fragments, overlapped": dataclasses.replace(
        IN_PAIRS, averaging=AveragingConfig(group_size=2, num_fragments=2, overlap_steps=2)
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("step", ["is_part", "handed_down"])
async def test_the_audit_counts_all_once_where_a_member_of_a_group_dies(
    config: RunConfig, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its group, or while a result is handed down to it."""
    monkeypatch.setattr("tests.support.chain.PATIENCE_SECONDS", 200.0)
    average, killed, steps = Participant.average, list[str](), 0
    async with whole_swarm(config, tmp_path / "events", num_peers=(6, 1, 1)) as swarm:
        leader_id = min(peer.peer_id for peer in swarm.peers if peer.stage == 0)

        async def dying(self: Participant, request: pb.AverageRequest) -> pb.AverageReply:
            own_id, gives = self.context.own_id, {share.contact.peer_id: share.num_samples for share in request.shares}
            is_handed = request.HasField("handed_down") and gives[own_id] == 0
            is_step = request.is_part if step == "is_part" else is_handed
            if is_step and not killed and own_id != leader_id:
                killed.append(own_id)
                (peer,) = (peer for peer in swarm.peers if peer.peer_id == own_id)
                await peer.kill()
            return await average(self, request)

        monkeypatch.setattr(Participant, "average", dying)
        while not killed and steps < 20:
            # A round of few members has no groups.
            await swarm.train(2, first=steps)
            steps += 2
        await swarm.train(2, first=steps)
        alive = [peer for peer in swarm.peers if peer.stage == 0 and peer.peer_id not in killed]
        await eventually(lambda: all(p.server is not None and p.server.stage.round > steps for p in alive))
    assert len(killed) == 1
    report = audit(swarm.logs)
    assert report.findings.violations == []
    assert report.findings.digests_compared > len(alive)
