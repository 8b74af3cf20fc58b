"""The parts of the bench `exactly-once` that judge: what it plants, and whom it may kill."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from peers.local.supervisor import Child, Supervisor
from peers.shared.option_types import StageChoice, StagesOrAuto
from scripts.benches.exactly_once import FAULTS, SPANS, FaultySwarm, Options, Scenario, _config, _held, _plant
from scripts.benches.shared.swarm import ServingPeer, SwarmProcesses
from swarm.types import Block, PeerRecord, PeerState
from tests.audit.honest import HonestRun


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("has_span", [False, True])
def test_a_planted_duplicate_and_a_planted_loss_are_found(tmp_path: Path, seed: int, has_span: bool) -> None:
    run = HonestRun(tmp_path / "logs", has_span=has_span)
    run.accumulate("peer-1b", 4)
    run.roll_back("peer-1b", 4)
    for number in range(2):
        run.round(number)
    assert _plant(run.files, tmp_path / "planted", random.Random(seed)) == {"duplicate": 1, "loss": 1}


def test_only_what_counts_is_stolen(tmp_path: Path) -> None:
    run = HonestRun(tmp_path)
    run.accumulate("peer-0a", 1)
    run.roll_back("peer-0a", 1)
    run.round(0)
    run.train("peer-0a", 8)
    assert len(_held(tmp_path / "peer-0a.jsonl")) == 4
    assert _held(tmp_path / "trainer.jsonl") == []


class _Idle(SwarmProcesses):
    """A swarm whose peers sleep, and serve at once what they are told; `auto` serves stage 1."""

    def launch_peer(self, stage: int | StagesOrAuto, **options: Any) -> Child:
        self._num_started += 1
        return self.children.start(f"{stage}-{self._num_started}", ["sleep", "60"])

    def until_ready(self, child: Child, stage: int | StagesOrAuto) -> ServingPeer:
        span = StageChoice(1, 1) if stage == "auto" else StageChoice(stage, stage) if isinstance(stage, int) else stage
        blocks = [*map(Block, span.stages(3))]
        record = PeerRecord(
            peer_id="0" * 40, name="", announced_at=0.0, stage=blocks[0].stage, endpoint="127.0.0.1:1",
            state=PeerState.SERVING,
        )  # fmt: skip
        return ServingPeer(child=child, record=record, dht_address="", blocks=blocks, told=stage)


def _told(faulty: FaultySwarm) -> list[str]:
    return sorted(str(peer.told) for peer in faulty.swarm.peers)


@pytest.mark.parametrize(
    ("peers", "scenario"),
    [
        ([], "kills"), ([], "pairs"), ([], "spans"), ([0, 1, 2], "kills"), ([StageChoice(), 2], "spans"),
        ([StageChoice(0, 1), 0, "auto", 2], "spans"), ([0, 1, 1, 2], "pairs"), ([0, 0, 1, 1, 2, 2], "spans"),
    ],
)  # fmt: skip
def test_nobody_is_killed_whom_nobody_can_replace(
    peers: list[int | StagesOrAuto], scenario: Scenario, tmp_path: Path
) -> None:
    with Supervisor(tmp_path) as children:
        swarm = _Idle(_config(Options()), children, tmp_path)
        swarm.start_peers(peers)
        faulty = FaultySwarm(swarm, random.Random(0))
        assert not any(FAULTS[scenario](faulty) for _ in range(10))
        assert not faulty.faults
        assert len(swarm.peers) == len(peers)


def test_a_process_of_several_stages_is_killed_and_another_one_told_the_same(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as children:
        swarm = _Idle(_config(Options()), children, tmp_path)
        swarm.start_peers(SPANS)
        faulty = FaultySwarm(swarm, random.Random(0))
        before = _told(faulty)
        killed = set[str]()
        for _ in range(20):
            assert FAULTS["spans"](faulty)
            [(newcomer, told)] = faulty.joining
            killed.add(str(told))
            swarm.peers.append(swarm.until_ready(newcomer, told))
            faulty.joining.clear()
            assert _told(faulty) == before
        assert killed == {"0-2", "0-1"}
        assert faulty.faults == {"kill": 20}


def test_a_swarm_in_which_nothing_fails_or_too_little_has_not_been_put_to_test(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as children:
        swarm = SwarmProcesses(_config(Options()), children, tmp_path)
        assert not FaultySwarm(swarm, random.Random(0)).was_put_to_test
        assert not FaultySwarm(swarm, random.Random(0), Counter(kill=3), owed=1).was_put_to_test
        assert FaultySwarm(swarm, random.Random(0), Counter(kill=3)).was_put_to_test
