"""The state with which a stage peer begins, depending on the rounds of the others and the checkpoints in its folder."""

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Literal

import pytest
import torch

from peers.stage_peer.others import Others
from peers.stage_peer.resume import Beginning, ResumeOptions, choose, genesis, with_sizes_of
from swarm.audit.audit import audit
from swarm.checkpoint import file
from swarm.checkpoint.file import Header
from swarm.checkpoint.folder import CheckpointFolder
from swarm.config import (
    Amendment,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RoundsConfig,
    RunConfig,
    StagesConfig,
    Timeline,
)
from swarm.config.schedule import learning_rate
from swarm.errors import Fatal, PeerUnavailable
from swarm.types import Block
from tests.averaging.doubles import until
from tests.checkpoint.states import CONFIG, cut, header_of, trained, write_cut
from tests.support import locked
from tests.support.commits import state_tensors
from tests.support.whole_swarm import whole_swarm

SYNCHRONOUS = RunConfig(
    model=ModelConfig(num_layers=3, d_model=8, num_heads=2),
    stages=StagesConfig(num_stages=3),
    rounds=RoundsConfig(setting="synchronous", round_samples=80),
)
DILOCO = dataclasses.replace(SYNCHRONOUS, rounds=RoundsConfig(setting="diloco", round_samples=80))
TIED = dataclasses.replace(DILOCO, model=dataclasses.replace(DILOCO.model, tied_embeddings=True))
SHAPES = {"some.weight": torch.Size([2])}
STAGE = 1

FIRST, LAST = Block(0), Block(2)
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
    options = ResumeOptions(round_number=round_number, had_checkpoints=had_checkpoints, starts_over=starts_over)
    return choose(config, Block(stage), SHAPES, others, folder, options)


def _value(beginning: Beginning | None) -> float:
    """The round from which these weights come."""
    assert beginning is not None
    assert beginning.restored is not None
    return float(beginning.restored.tensors["anchor/some.weight"][0])


def test_a_run_that_goes_on_keeps_the_sizes_that_it_had(tmp_path: Path) -> None:
    """They might be chosen otherwise now, because it is cut into other stages, say."""
    sizes = DataConfig(sequence_length=100, microbatch_size=20)
    _write(
        tmp_path,
        dataclasses.replace(DILOCO, data=sizes, rounds=RoundsConfig(inner_batch_samples=40, round_samples=80)),
        1,
    )
    rounds = RoundsConfig(inner_batch_samples=0, round_samples=160)
    left_open = dataclasses.replace(DILOCO, data=DataConfig(sequence_length=0, microbatch_size=0), rounds=rounds)
    found = with_sizes_of(tmp_path, left_open)
    assert found.data == sizes
    assert (found.rounds.inner_batch_samples, found.rounds.round_samples) == (40, 160)
    assert with_sizes_of(tmp_path / "empty", left_open) == left_open


@both
def test_the_first_peer_of_a_run_begins_at_its_newest_checkpoint(config: RunConfig, tmp_path: Path) -> None:
    folder = _write(tmp_path, config, 30, 40)
    beginning = _choose(config, Others(), folder)
    assert beginning is not None
    assert _value(beginning) == 40
    assert (beginning.round, beginning.run_samples, beginning.lineage) == (40, 3200, "lineage 40")
    # A synchronous round's microbatches follow from its number, and ids of the round that had begun are used again.
    assert beginning.highest_microbatch == (40 * 80 // 8 - 1 if config.rounds.synchronous else 400)
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
def test_no_peer_holds_the_beginning_of_a_run_without_the_model_that_it_begins_with(config: RunConfig) -> None:
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, weights="0" * 64))
    begun = Others(held_at=0)
    with pytest.raises(Fatal, match="no peer that answers has the weights with which stage 1 begins"):
        choose(config, Block(STAGE), SHAPES, begun, None, ResumeOptions())
    with pytest.raises(PeerUnavailable, match="no peer that answers has the weights"):
        choose(config, Block(STAGE), SHAPES, begun, None, ResumeOptions(moves=True))
    assert choose(config, Block(STAGE), SHAPES, begun, None, ResumeOptions(has_weights=True)) is None
    assert choose(config, Block(STAGE), SHAPES, Others(held_at=1), None, ResumeOptions()) is None, "it is downloaded"


@both
def test_a_run_with_other_variants_or_paths_is_another_run(config: RunConfig, tmp_path: Path) -> None:
    """What a variant has learnt belongs to its paths."""
    crossed = StagesConfig(num_stages=3, variants=(2, 1, 2), paths=((0, 0, 1), (1, 0, 0)))
    was = dataclasses.replace(config, stages=dataclasses.replace(crossed, paths=((0, 0, 0), (1, 0, 1))))
    _write(tmp_path, was, 30)
    assert _choose(was, Others(), CheckpointFolder(tmp_path, was)) is not None
    for now, field in ((crossed, "stages.paths"), (StagesConfig(num_stages=3), "stages.variants")):
        run = dataclasses.replace(config, stages=now)
        with pytest.raises(Fatal, match=rf"with all of stage 1: .* is of another run: {field} is "):
            _choose(run, Others(), CheckpointFolder(tmp_path, run))


@both
def test_a_folder_in_which_nothing_is_sound_does_not_lead_to_a_new_start(config: RunConfig, tmp_path: Path) -> None:
    _write(tmp_path, config, 40)
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    with pytest.raises(Fatal, match="no sound checkpoint with all of stage 1"):
        _choose(config, Others(), CheckpointFolder(tmp_path, config))


@both
@pytest.mark.parametrize("rounds", [{}, {FIRST: 0}, {FIRST: 40}])
def test_nobody_starts_anew_beside_checkpoints(config: RunConfig, rounds: dict[Block, int]) -> None:
    with pytest.raises(ValueError, match="go on with --resume"):
        _choose(config, Others(rounds=rounds), None, had_checkpoints=True)


@both
def test_a_lost_stage_does_not_start_over_unasked(config: RunConfig, tmp_path: Path) -> None:
    """A peer that has its checkpoint would find a holder, and take over the initial weights."""
    expected = (
        r"nobody holds stage 1 any more: if its peers are only frozen or cut off, start this one again when they are "
        r"back; if they are gone for good, begin with a checkpoint \(--resume DIR\)\. Without one, --start-over "
    )
    named = rf"--resume {re.escape(str(tmp_path))} has no checkpoint, and "
    for folder, begins in ((None, ""), (CheckpointFolder(tmp_path, config), named)):
        with pytest.raises(Fatal, match=f"^{begins}{expected}"):
            _choose(config, Others(rounds={FIRST: 40, LAST: 41}, latest=41), folder)
        assert _choose(config, Others(rounds={FIRST: 0, LAST: 0}, latest=0), folder) is None, "nothing was learnt yet"


@both
def test_nobody_is_advised_to_throw_away_what_peers_hold_that_fell_silent_just_now(config: RunConfig) -> None:
    with pytest.raises(Fatal, match=r"^stage 1 was held by gpu-1, silent since 12:03:10: .*again when they are back$"):
        _choose(config, Others(rounds={FIRST: 40, LAST: 41}, latest=41, silent="gpu-1, silent since 12:03:10"), None)


@both
def test_a_lost_stage_that_is_to_starts_over_at_the_others_round(config: RunConfig) -> None:
    beginning = _choose(config, Others(rounds={FIRST: 40, LAST: 41}, latest=41, samples=3280), None, starts_over=True)
    assert beginning is not None
    assert beginning.restored is None
    assert (beginning.round, beginning.run_samples) == (41, 3280)
    expected = hashlib.sha256(f"{genesis(config, Block(STAGE))} again at 41".encode()).hexdigest()
    assert beginning.lineage == expected
    assert beginning.highest_microbatch > 41 * config.microbatches_per_round


@both
def test_a_lost_stage_comes_back_at_exactly_the_others_round(config: RunConfig, tmp_path: Path) -> None:
    """This also holds if there is a newer checkpoint, because the others may have been resumed from an earlier one."""
    folder = _write(tmp_path, config, 20, 30, 40)
    beginning = _choose(config, Others(rounds={FIRST: 30, LAST: 30}, latest=30, samples=1), folder, starts_over=True)
    assert beginning is not None
    assert (_value(beginning), beginning.round, beginning.run_samples, beginning.lineage) == (
        30, 30, 2400, "lineage 30",
    )  # fmt: skip


def test_synchronous_stages_do_not_go_on_from_different_rounds(tmp_path: Path) -> None:
    folder = _write(tmp_path, SYNCHRONOUS, 30, 40)
    with pytest.raises(Fatal, match=r"stand at round 43, and stage 1 in .* at round 40: .* --resume-round 40"):
        _choose(SYNCHRONOUS, Others(rounds={FIRST: 43, LAST: 43}, latest=43), folder)
    with pytest.raises(Fatal, match="stand at round 0, and stage 1"):
        _choose(SYNCHRONOUS, Others(rounds={FIRST: 0}, latest=0), folder)
    with pytest.raises(Fatal, match="stand at round 39 and 41, and"):
        _choose(SYNCHRONOUS, Others(rounds={FIRST: 39, LAST: 41}, latest=41), folder)
    with pytest.raises(Fatal, match=r"stand at round 40, and stage 1 in .* at round 30: "):
        _choose(SYNCHRONOUS, Others(rounds={FIRST: 40, LAST: 40}, latest=40), folder, round_number=30)
    assert _value(_choose(SYNCHRONOUS, Others(rounds={FIRST: 40, LAST: 40}, latest=40), folder)) == 40


def test_a_synchronous_stage_may_be_a_round_late_for_the_others_can_repeat_one(tmp_path: Path) -> None:
    folder = _write(tmp_path, SYNCHRONOUS, 40)
    for rounds in ({FIRST: 41, LAST: 41}, {FIRST: 40, LAST: 41}):
        beginning = _choose(SYNCHRONOUS, Others(rounds=rounds, repeating=frozenset({FIRST, LAST})), folder)
        assert beginning is not None
        assert (_value(beginning), beginning.round, beginning.lineage) == (40, 40, "lineage 40")
    with pytest.raises(Fatal, match="stand at round 39, and"):
        _choose(SYNCHRONOUS, Others(rounds={FIRST: 39, LAST: 39}, latest=39), folder)
    # This peer began at that round itself, with a checkpoint or a download, so it has no weights of the round before.
    with pytest.raises(Fatal, match=r"stand at round 41, .* --resume-round 40"):
        _choose(SYNCHRONOUS, Others(rounds={FIRST: 41, LAST: 41}, latest=41, repeating=frozenset({FIRST})), folder)
    between = Others(rounds={FIRST: 40, LAST: 41}, latest=41, repeating=frozenset({LAST}))
    assert _value(_choose(SYNCHRONOUS, between, folder)) == 40


def test_a_diloco_stage_enters_late_with_the_newest_that_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _write(tmp_path, DILOCO, 30, 40)
    others = Others(rounds={FIRST: 43, LAST: 42}, latest=43, samples=3440)
    beginning = _choose(DILOCO, others, folder)
    assert beginning is not None
    assert _value(beginning) == 40
    assert (beginning.round, beginning.run_samples) == (43, 3440)
    assert beginning.lineage not in ("lineage 40", genesis(DILOCO, Block(STAGE)))
    again = _choose(DILOCO, others, folder)
    assert again is not None
    assert again.lineage == beginning.lineage, "two who enter at once are on one branch"
    assert beginning.highest_microbatch >= 400 + 3 * DILOCO.microbatches_per_round
    assert "it enters at round 43 as it was at round 40" in caplog.text
    with pytest.raises(Fatal, match="the run begins anew at round 0"):
        _choose(DILOCO, Others(rounds={FIRST: 0}, latest=0), folder)


def test_ids_that_longer_rounds_have_used_are_left_out(tmp_path: Path) -> None:
    """Amendments may have made rounds longer since the checkpoint was written."""
    folder = _write(tmp_path, DILOCO, 40)
    longer = 5 * DILOCO.rounds.round_samples
    beginning = _choose(DILOCO, Others(rounds={FIRST: 43, LAST: 43}, latest=43, samples=3200 + 3 * longer), folder)
    assert beginning is not None
    assert beginning.highest_microbatch >= 400 + 3 * longer // DILOCO.data.microbatch_size


def test_stages_that_share_a_block_stay_together_with_diloco_too(tmp_path: Path) -> None:
    first = _write(tmp_path, TIED, 40, stage=0)
    with pytest.raises(Fatal, match="stand at round 43, and stage 0"):
        _choose(TIED, Others(rounds={Block(1): 40, LAST: 43}, latest=43), first, stage=0)
    assert _value(_choose(TIED, Others(rounds={Block(1): 43, LAST: 40}, latest=43), first, stage=0)) == 40
    (tmp_path / "middle").mkdir()
    middle = _write(tmp_path / "middle", TIED, 40)
    late = _choose(TIED, Others(rounds={FIRST: 43, LAST: 43}, latest=43), middle)
    assert late is not None
    assert late.round == 43


# -- another configuration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "now"), [("adamw", "muon")])
async def test_another_optimizer_begins_without_the_memory_of_the_one_before(
    tmp_path: Path, before: Literal["adamw", "muon"], now: Literal["adamw", "muon"], caplog: pytest.LogCaptureFixture
) -> None:
    """The weights are the checkpoint's. AdamW's moments stay for the tensors that both optimizers leave to AdamW."""
    configs = {
        name: dataclasses.replace(cut(2), optimizer=dataclasses.replace(CONFIG.optimizer, name=name))
        for name in (before, now)
    }
    (tmp_path / "checkpoints").mkdir()
    write_cut(tmp_path / "checkpoints", configs[before], 3)
    async with whole_swarm(configs[now], tmp_path / "logs", num_peers=(), resume=tmp_path / "checkpoints") as swarm:
        peer = await swarm.start(0)
        assert peer.server is not None
        state = (await peer.server.member.snapshot()).tensors
    expected = state_tensors(trained(configs[before], 0, 3))
    is_shared = {name: "layers" not in name or "norm" in name for name in expected}
    kept = {name for name in expected if name.startswith("anchor/") or is_shared[name]}
    assert state.keys() == kept
    assert all(torch.equal(state[name], expected[name]) for name in kept)
    assert f"  optimizer.name: {before!r} before, {now!r} now" in caplog.messages
    assert f"  {now} begins with no memory of the parameters that it steps in another way" in caplog.messages


def _counting(config: RunConfig, microbatch: int) -> torch.Tensor:
    """Tokens that count up, from random ones: what comes next can be learnt. No sample comes twice."""
    first = torch.randint(config.model.vocab_size, (2, 1), generator=torch.Generator().manual_seed(microbatch))
    return ((first + torch.arange(config.data.sequence_length + 1)) % config.model.vocab_size).to(torch.int32)


@pytest.mark.slow
async def test_a_run_that_was_begun_alone_goes_on_as_diloco_with_friends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The schedule and the data go on by the samples, Adam by its moments, and no microbatch is trained on twice."""
    caplog.set_level("INFO")
    optimizer = OptimizerConfig(
        name="adamw", learning_rate=0.02, schedule="cosine", total_samples=1000, warmup_samples=60
    )
    alone = dataclasses.replace(cut(2), optimizer=optimizer)
    rounds = RoundsConfig(setting="diloco", round_samples=64, inner_batch_samples=8)
    together = dataclasses.replace(alone, rounds=rounds)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    async with whole_swarm(alone, tmp_path / "alone", num_peers=(1, 1), tokens=_counting) as swarm:
        before = await swarm.train(7)
        for peer in swarm.peers:
            assert peer.server is not None
            snapshot, highest = await peer.server.member.snapshot(), peer.server.member.progress().highest_microbatch
            header = Header(
                config=alone, stage=peer.stage, round=snapshot.round, run_samples=snapshot.run_samples,
                lineage=snapshot.lineage, highest_microbatch=highest, state_digest=snapshot.digest,
            )  # fmt: skip
            file.write(folder, header, snapshot.tensors, owner="test")
    async with whole_swarm(together, tmp_path / "logs", num_peers=(1, 1), resume=folder, tokens=_counting) as swarm:
        for number, peer in enumerate(swarm.peers):
            assert peer.server is not None
            weights, member = peer.server.stage.context.backend.weights, peer.server.member
            state = (await member.snapshot()).tensors
            saved = file.load(folder / str(file.FileName(round=7, num_stages=2, stage=number)), weights.masters)
            assert state.keys() == {f"anchor/{name}" for name in weights.masters}, "the outer step has no memory yet"
            assert all(torch.equal(value, saved[name]) for name, value in state.items())
            assert member.progress().highest_microbatch == 7 * 8 - 1
            assert (weights.round.number, member.run_samples) == (7, 7 * 16)
            assert weights.learning_rate == learning_rate(optimizer, 7 * 16)
        for stage in (0, 1):
            await swarm.start(stage)
        after = await swarm.train(3, first=7)
        members = [peer.server.member for peer in swarm.peers if peer.server is not None]
        # One stage may still be committing what it has learnt beyond the last step.
        await until(lambda: len({member.progress().round for member in members}) == 1, 60.0)
        digests = [await member.state_digest() for member in members]
    assert digests[:2] == digests[2:], "both members of each stage"
    losses = [step.totals.loss or 0.0 for step in [before[-1], after[0], after[-1]]]
    assert losses[0] >= losses[1] > losses[2] > 0.0
    report = audit(swarm.logs)
    assert not report.findings.violations
    assert "  rounds.setting: 'synchronous' before, 'diloco' now" in caplog.messages


@pytest.mark.parametrize("is_the_same_run", [True, False])
async def test_amendments_are_kept_by_a_run_that_goes_on_and_count_in_no_other(
    tmp_path: Path, is_the_same_run: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = dataclasses.replace(cut(2), owner=locked.OWNER.authority.fingerprint)
    timeline = Timeline(before)
    timeline.add([Amendment.sign(locked.OWNER, timeline, 2, ["optimizer.learning_rate=0.02"]).text])
    (tmp_path / "checkpoints").mkdir()
    weights = trained(before, 0, 3)
    header = dataclasses.replace(header_of(before, 0, weights), amendments=timeline.texts)
    path = file.write(tmp_path / "checkpoints", header, state_tensors(weights), owner="test")
    assert file.read_header(path, before) == header
    now = before if is_the_same_run else dataclasses.replace(before, owner=locked.STRANGER.authority.fingerprint)
    async with whole_swarm(now, tmp_path / "logs", num_peers=(), resume=tmp_path / "checkpoints") as swarm:
        peer = await swarm.start(0)
        assert peer.server is not None
        weights = peer.server.stage.context.backend.weights
        assert weights.timeline.texts == (timeline.texts if is_the_same_run else ())
        assert weights.learning_rate == (0.02 if is_the_same_run else 0.01)
    assert ("  optimizer.learning_rate: 0.02 before, 0.01 now" in caplog.messages) is not is_the_same_run
