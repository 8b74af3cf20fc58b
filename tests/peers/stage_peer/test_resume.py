"""With what a stage peer begins, given where the others are and what is in its folder."""

import dataclasses
import hashlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch

from peers.shared.network import KnownPeers
from peers.stage_peer import resume
from peers.stage_peer.resume import Beginning, Others, ResumeOptions, choose, describe, find_others, genesis
from swarm.checkpoint import file
from swarm.checkpoint.file import Header
from swarm.checkpoint.folder import CheckpointFolder
from swarm.config import ModelConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.dht.directory import Directory
from swarm.errors import Fatal, NotReady, PeerUnavailable
from swarm.machine.clock import SystemClock
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PeerRecord, PeerState
from tests.support.chain import DILOCO as CHAIN_DILOCO
from tests.support.chain import SYNCHRONOUS as CHAIN_SYNCHRONOUS
from tests.support.chain import Chain, running_chain

SYNCHRONOUS = RunConfig(
    model=ModelConfig(num_layers=3, d_model=8, num_heads=2),
    stages=StagesConfig(num_stages=3),
    rounds=RoundsConfig(setting="synchronous", round_samples=80),
)
DILOCO = dataclasses.replace(SYNCHRONOUS, rounds=RoundsConfig(setting="diloco", round_samples=80))
TIED = dataclasses.replace(DILOCO, model=dataclasses.replace(DILOCO.model, tied_embeddings=True))
SHAPES = {"some.weight": torch.Size([2])}
STAGE = 1

both = pytest.mark.parametrize("config", [SYNCHRONOUS, DILOCO], ids=["synchronous", "diloco"])


def _write(folder: Path, config: RunConfig, *rounds: int, stage: int = STAGE) -> CheckpointFolder:
    for number in rounds:
        header = Header(
            config=config, stage=stage, round=number, run_samples=80 * number, lineage=f"lineage {number}",
            highest_microbatch=10 * number, state_digest="",
        )  # fmt: skip
        file.write(folder, header, {"anchor/some.weight": torch.full((2,), float(number))}, owner="test")
    return CheckpointFolder(folder, config)


def _choose(
    config: RunConfig, others: Others, folder: CheckpointFolder | None, *, stage: int = STAGE,
    round_number: int | None = None, had_checkpoints: bool = False, starts_over: bool = False,
) -> Beginning | None:  # fmt: skip
    options = ResumeOptions(
        round_number=round_number, had_checkpoints=had_checkpoints, starts_over=starts_over
    )  # fmt: skip
    return choose(config, stage, SHAPES, others, folder, options)


def _value(beginning: Beginning | None) -> float:
    """Which round's weights these are."""
    assert beginning is not None
    assert beginning.restored is not None
    return float(beginning.restored.tensors["anchor/some.weight"][0])


@both
def test_the_first_peer_of_a_run_begins_at_its_newest_checkpoint(config: RunConfig, tmp_path: Path) -> None:
    folder = _write(tmp_path, config, 30, 40)
    beginning = _choose(config, Others(), folder)
    assert beginning is not None
    assert _value(beginning) == 40
    assert (beginning.round, beginning.run_samples, beginning.lineage) == (40, 3200, "lineage 40")
    assert beginning.highest_microbatch == 400
    earlier = _choose(config, Others(), folder, round_number=30)
    assert earlier is not None
    assert (_value(earlier), earlier.round) == (30, 30)
    with pytest.raises(Fatal, match="no sound checkpoint of round 35 with all of stage 1"):
        _choose(config, Others(), folder, round_number=35)


@both
def test_living_holders_are_never_overruled(config: RunConfig, tmp_path: Path) -> None:
    folder = _write(tmp_path, config, 40)
    for held_at in (0, 39, 40, 41):
        assert _choose(config, Others(held_at=held_at), folder, had_checkpoints=True) is None


@both
def test_an_empty_folder_is_no_obstacle_to_a_first_start(config: RunConfig, tmp_path: Path) -> None:
    assert _choose(config, Others(), CheckpointFolder(tmp_path, config)) is None
    assert _choose(config, Others(rounds={0: 0, 2: 0}), CheckpointFolder(tmp_path, config)) is None
    with pytest.raises(Fatal, match="has no checkpoint of round 30"):
        _choose(config, Others(), CheckpointFolder(tmp_path, config), round_number=30)


@both
def test_a_folder_in_which_nothing_is_sound_does_not_lead_to_a_new_start(config: RunConfig, tmp_path: Path) -> None:
    _write(tmp_path, config, 40)
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    with pytest.raises(Fatal, match="no sound checkpoint with all of stage 1"):
        _choose(config, Others(), CheckpointFolder(tmp_path, config))


@both
@pytest.mark.parametrize("rounds", [{}, {0: 0}, {0: 40}])
def test_nobody_starts_anew_beside_checkpoints(config: RunConfig, rounds: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="go on with --resume"):
        _choose(config, Others(rounds=rounds), None, had_checkpoints=True)


@both
def test_a_lost_stage_does_not_start_over_unasked(config: RunConfig, tmp_path: Path) -> None:
    """Whoever has its checkpoint would find a holder, and take over those weights."""
    expected = r"^nobody holds stage 1 any more: begin with its checkpoint \(--resume DIR\), or with --start-over from "
    for folder in (None, CheckpointFolder(tmp_path, config)):
        with pytest.raises(Fatal, match=expected):
            _choose(config, Others(rounds={0: 40, 2: 41}), folder)
        assert _choose(config, Others(rounds={0: 0, 2: 0}), folder) is None, "nothing was learnt yet"


@both
def test_a_lost_stage_that_is_to_starts_over_at_the_others_round(config: RunConfig) -> None:
    beginning = _choose(config, Others(rounds={0: 40, 2: 41}, samples=3280), None, starts_over=True)
    assert beginning is not None
    assert beginning.restored is None
    assert (beginning.round, beginning.run_samples) == (41, 3280)
    expected = hashlib.sha256(f"{genesis(config, STAGE)} again at 41".encode()).hexdigest()
    assert beginning.lineage == expected
    assert beginning.highest_microbatch > 41 * config.microbatches_per_round


@both
def test_a_lost_stage_comes_back_at_exactly_the_others_round(config: RunConfig, tmp_path: Path) -> None:
    """Also where a newer one is there: the others may have been resumed from an earlier one."""
    folder = _write(tmp_path, config, 20, 30, 40)
    beginning = _choose(config, Others(rounds={0: 30, 2: 30}, samples=1), folder, starts_over=True)
    assert beginning is not None
    assert (_value(beginning), beginning.round, beginning.run_samples, beginning.lineage) == (
        30, 30, 2400, "lineage 30",
    )  # fmt: skip


def test_synchronous_stages_do_not_go_on_from_different_rounds(tmp_path: Path) -> None:
    folder = _write(tmp_path, SYNCHRONOUS, 30, 40)
    with pytest.raises(Fatal, match=r"stand at round 43, and stage 1 in .* at round 40: .* --resume-round 40"):
        _choose(SYNCHRONOUS, Others(rounds={0: 43, 2: 43}), folder)
    with pytest.raises(Fatal, match="stand at round 0, and stage 1"):
        _choose(SYNCHRONOUS, Others(rounds={0: 0}), folder)
    with pytest.raises(Fatal, match="stand at round 39 and 41, and"):
        _choose(SYNCHRONOUS, Others(rounds={0: 39, 2: 41}), folder)
    with pytest.raises(Fatal, match=r"stand at round 40, and stage 1 in .* at round 30: "):
        _choose(SYNCHRONOUS, Others(rounds={0: 40, 2: 40}), folder, round_number=30)
    assert _value(_choose(SYNCHRONOUS, Others(rounds={0: 40, 2: 40}), folder)) == 40


def test_a_synchronous_stage_may_be_a_round_late_for_the_others_can_repeat_one(tmp_path: Path) -> None:
    folder = _write(tmp_path, SYNCHRONOUS, 40)
    for rounds in ({0: 41, 2: 41}, {0: 40, 2: 41}):
        beginning = _choose(SYNCHRONOUS, Others(rounds=rounds, repeating=frozenset({0, 2})), folder)
        assert beginning is not None
        assert (_value(beginning), beginning.round, beginning.lineage) == (40, 40, "lineage 40")
    with pytest.raises(Fatal, match="stand at round 39, and"):
        _choose(SYNCHRONOUS, Others(rounds={0: 39, 2: 39}), folder)
    # One began there itself, with a checkpoint or a download: it has no other weights.
    with pytest.raises(Fatal, match=r"stand at round 41, .* --resume-round 40"):
        _choose(SYNCHRONOUS, Others(rounds={0: 41, 2: 41}, repeating=frozenset({0})), folder)
    assert _value(_choose(SYNCHRONOUS, Others(rounds={0: 40, 2: 41}, repeating=frozenset({2})), folder)) == 40


def test_a_diloco_stage_enters_late_with_the_newest_that_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _write(tmp_path, DILOCO, 30, 40)
    others = Others(rounds={0: 43, 2: 42}, samples=3440)
    beginning = _choose(DILOCO, others, folder)
    assert beginning is not None
    assert _value(beginning) == 40
    assert (beginning.round, beginning.run_samples) == (43, 3440)
    assert beginning.lineage not in ("lineage 40", genesis(DILOCO, STAGE))
    again = _choose(DILOCO, others, folder)
    assert again is not None
    assert again.lineage == beginning.lineage, "two who enter at once are on one branch"
    assert beginning.highest_microbatch >= 400 + 3 * DILOCO.microbatches_per_round
    assert "it enters at round 43 as it was at round 40" in caplog.text
    with pytest.raises(Fatal, match="the run begins anew at round 0"):
        _choose(DILOCO, Others(rounds={0: 0}), folder)


def test_stages_that_share_a_block_stay_together_with_diloco_too(tmp_path: Path) -> None:
    first = _write(tmp_path, TIED, 40, stage=0)
    with pytest.raises(Fatal, match="stand at round 43, and stage 0"):
        _choose(TIED, Others(rounds={1: 40, 2: 43}), first, stage=0)
    assert _value(_choose(TIED, Others(rounds={1: 43, 2: 40}), first, stage=0)) == 40
    (tmp_path / "middle").mkdir()
    middle = _write(tmp_path / "middle", TIED, 40)
    late = _choose(TIED, Others(rounds={0: 43, 2: 43}), middle)
    assert late is not None
    assert late.round == 43


# -- where the others are ----------------------------------------------------------------------------------------------


class _Directory:
    """Has some stages of a chain, and at each of them a peer that is dead and was far ahead."""

    def __init__(self, chain: Chain, stages: Collection[int]) -> None:
        self.num_looks = 0
        self.silent: dict[int, int] = {}
        """For how many looks a stage's dead peer is still announced."""
        self.leaving: Collection[int] = ()
        """Stages whose living peer leaves."""
        self._chain = chain
        self._stages = stages

    async def peers(self, stage: int) -> list[PeerRecord]:
        self.num_looks += 1
        here = [peer.record for peer in self._chain.at(stage)]
        if stage in self.leaving:
            return [record.model_copy(update={"state": PeerState.LEAVING}) for record in here]
        gone = {"peer_id": "f" * 40, "endpoint": "127.0.0.1:1", "round": 99}
        dead = [record.model_copy(update=gone) for record in here]
        if stage in self._stages:
            return [*here, *dead]
        self.silent[stage] = self.silent.get(stage, 0) - 1
        return dead if self.silent[stage] >= 0 else []


def _describe(
    config: RunConfig, stage: int, turns: Iterator[int | None], committed: int, num_forwards: int = 0
) -> pb.DescribeReply:
    number = next(turns)
    if number is None:
        raise NotReady("it says nothing")
    rounds = [pb.RoundReport(round=number - 1 - back) for back in reversed(range(committed))]
    return pb.DescribeReply(
        run_id=config.run_id, stage=stage, round=number, run_samples=16 * number, rounds=rounds,
        counters=pb.StageCounters(forwards=num_forwards),
    )  # fmt: skip


async def _find(
    rounds: Mapping[int, Sequence[int | None]], *, config: RunConfig = CHAIN_SYNCHRONOUS, stage: int = STAGE,
    patient: bool = False, gives_up: bool = False, silent_looks: Mapping[int, int] | None = None,
    committed: Mapping[int, int] | None = None, num_forwards: int = 0, leaving: Collection[int] = (),
) -> tuple[Others, int]:  # fmt: skip
    """What a joiner learns, and how often it looked again; `rounds` has what each stage answers, time after time.

    `silent_looks`: of stages that never answer, for how many looks they have a dead peer that is announced.
    `committed`: how many rounds each has committed itself. `leaving`: stages whose peer is about to be gone.
    """
    async with running_chain(config) as chain:
        directory = _Directory(chain, rounds)
        directory.leaving = leaving
        known = KnownPeers(chain.router)
        for number, answers in rounds.items():
            (peer,) = chain.at(number)
            # The last one again and again.
            turns = itertools.chain(answers, itertools.repeat(answers[-1]))
            peer.servicer._describe = partial(
                _describe, config, number, turns, (committed or {}).get(number, 0), num_forwards
            )  # fmt: skip
            known.update(number, await directory.peers(number))
        directory.silent.update(silent_looks or {})
        for number in {stage, *directory.silent}:
            known.update(number, await directory.peers(number))
        directory.num_looks = 0
        others = await find_others(
            config, stage, known=known, directory=cast(Directory, directory), channels=chain.peers[0].channels,
            clock=SystemClock(), patient=patient, gives_up=gives_up,
        )  # fmt: skip
        return others, directory.num_looks


async def test_whoever_holds_the_stage_is_all_that_matters() -> None:
    others, _ = await _find({0: [7], 1: [6], 2: [7]}, patient=True)
    assert others == Others(held_at=6)


@pytest.mark.parametrize("number", [0, STAGE])
async def test_a_joiner_learns_whether_anybody_was_given_a_microbatch_yet(number: int) -> None:
    for num_forwards in (0, 1):
        others, _ = await _find({number: [0]}, num_forwards=num_forwards)
        assert others.has_begun == bool(num_forwards)


async def test_a_peer_that_serves_another_stage_by_now_holds_nothing_of_this_one() -> None:
    async with running_chain(CHAIN_SYNCHRONOUS) as chain:
        (peer,) = chain.at(STAGE)
        records, channels = await _Directory(chain, {STAGE: []}).peers(STAGE), chain.peers[0].channels
        for stage in (STAGE, STAGE + 1):
            peer.servicer._describe = partial(_describe, CHAIN_SYNCHRONOUS, stage, itertools.repeat(6), 0)
            replies = await describe(CHAIN_SYNCHRONOUS, [records[0]], channels)
            assert [reply.round for reply in replies] == ([6] if stage == STAGE else [])


async def test_a_peer_of_another_run_by_now_does_not_answer() -> None:
    async with running_chain(CHAIN_SYNCHRONOUS) as chain:
        (peer,) = chain.at(STAGE)
        other = dataclasses.replace(CHAIN_SYNCHRONOUS, run="other")
        peer.servicer._describe = partial(_describe, other, STAGE, itertools.repeat(6), 0)
        assert await describe(CHAIN_SYNCHRONOUS, [peer.record], chain.peers[0].channels) == []


async def test_who_tells_of_a_round_that_nobody_counts_to_does_not_answer() -> None:
    async with running_chain(CHAIN_SYNCHRONOUS) as chain:
        (peer,) = chain.at(STAGE)
        peer.servicer._describe = partial(_describe, CHAIN_SYNCHRONOUS, STAGE, iter([1 << 58, 6]), 0)
        for expected in ([], [6]):
            replies = await describe(CHAIN_SYNCHRONOUS, [peer.record], chain.peers[0].channels)
            assert [reply.round for reply in replies] == expected


async def test_only_peers_that_answer_count() -> None:
    others, num_looks = await _find({0: [7], 2: [8]})
    assert others == Others(rounds={0: 7, 2: 8}, samples=128)
    assert (others.latest, num_looks) == (8, 0)
    assert (await _find({})) == (Others(), 0)


async def test_who_has_committed_a_round_itself_can_repeat_it() -> None:
    others, _ = await _find({0: [7], 2: [7]}, committed={0: 1})
    assert others.repeating == {0}
    others, _ = await _find({0: [7], 2: [7]}, committed={0: 3, 2: 2})
    assert others.repeating == {0, 2}


async def test_a_stage_whose_holders_are_announced_and_silent_does_not_begin_anew() -> None:
    others, num_looks = await _find({0: [7], 2: [8]}, silent_looks={STAGE: 3})
    assert others == Others(rounds={0: 7, 2: 8}, samples=128)
    assert num_looks == 3 * 3, "three looks at three stages"


async def test_a_stage_whose_holder_is_leaving_does_not_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    """It may stay, or write its last checkpoint."""
    others, num_looks = await _find({0: [7], STAGE: [8, 8, None], 2: [8]}, leaving={STAGE})
    assert others == Others(rounds={0: 7, 2: 8}, samples=128), "it is gone"
    assert num_looks == 2 * 3
    (said,) = [record.getMessage() for record in caplog.records if record.name == "peers.stage_peer.resume"]
    assert said.startswith("stage 1 is being left by ")


async def test_a_run_whose_peers_are_announced_and_silent_is_not_at_round_0(caplog: pytest.LogCaptureFixture) -> None:
    others, num_looks = await _find({0: [None, None, 7]})
    assert others == Others(rounds={0: 7}, samples=112)
    assert num_looks == 2 * 3
    others, num_looks = await _find({}, silent_looks={0: 3, 2: 2})
    assert (others, num_looks) == (Others(), 3 * 3), "announced no longer"
    said = [record.getMessage() for record in caplog.records if record.name == "peers.stage_peer.resume"]
    assert [line.split(" with ")[0] for line in said] == ["the run has gone on"] * 2, "once each time"


async def test_who_moves_does_not_wait_for_silent_peers_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "SETTLE_SECONDS", 0.2)
    with pytest.raises(PeerUnavailable, match="those who hold it do not answer"):
        await _find({0: [7]}, silent_looks={STAGE: 1000}, gives_up=True)
    with pytest.raises(PeerUnavailable, match="those who hold it are leaving it"):
        await _find({0: [7], STAGE: [8]}, leaving={STAGE}, gives_up=True)
    with pytest.raises(PeerUnavailable, match="those who serve the other stages do not answer"):
        await _find({}, silent_looks={0: 1000}, gives_up=True)


async def test_a_peer_with_a_checkpoint_waits_until_the_others_have_committed_the_same_round() -> None:
    others, num_looks = await _find({0: [8], 2: [7, 8]}, patient=True)
    assert others == Others(rounds={0: 8, 2: 8}, samples=128)
    assert num_looks > 0
    others, num_looks = await _find({0: [8], 2: [7, 8]}, patient=True, config=CHAIN_DILOCO)
    assert (others.rounds, num_looks) == ({0: 8, 2: 7}, 0)
