"""What a folder of checkpoints gives back: the newest round that is whole and sound, under any cut."""

import dataclasses
import logging
import shutil
from pathlib import Path

import pytest
import torch

from swarm.checkpoint import file
from swarm.checkpoint.folder import CheckpointFolder, Restored
from swarm.config import RunConfig
from swarm.stage.state import digest_of
from swarm.stage.weights import Round, StageWeights
from swarm.types import Block
from tests.checkpoint.states import CONFIG, cut, header_of, shapes_of, train_round, trained, write_cut
from tests.support.commits import state_tensors


def _restore(folder: Path, config: RunConfig, stage: int, round_number: int | None = None) -> Restored | None:
    shapes = shapes_of(trained(config, stage, 0))
    return CheckpointFolder(folder, config).restore(Block(stage), shapes, round_number=round_number)


def _rounds(folder: Path, config: RunConfig) -> list[int | None]:
    """The round at which each stage resumes."""
    restored = [_restore(folder, config, stage) for stage in range(config.stages.num_stages)]
    return [None if one is None else one.round for one in restored]


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-10] ^= 4
    path.write_bytes(content)


def test_a_variant_is_put_together_from_its_own_files(tmp_path: Path) -> None:
    paths = write_cut(tmp_path, cut(2), 4)
    weights = trained(cut(2), 1, 5)
    header = dataclasses.replace(header_of(cut(2), 1, weights), round=4, variant=1)
    other = file.write(tmp_path, header, state_tensors(weights), owner="test")
    restored = [
        CheckpointFolder(tmp_path, cut(2)).restore(block, shapes_of(weights)) for block in (Block(1), Block(1, 1))
    ]
    assert [one and one.files for one in restored] == [(paths[1],), (other,)]
    assert CheckpointFolder(tmp_path, cut(2)).restore(Block(1, 2), shapes_of(weights)) is None


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_another_cut_gives_the_tensors_of_a_run_that_was_never_cut_otherwise(tmp_path: Path, num_stages: int) -> None:
    """Weights, Adam's moments and its step counter are the same, and so is the next step."""
    write_cut(tmp_path, cut(3), 4)
    for stage in range(num_stages):
        config = cut(num_stages)
        expected = trained(config, stage, 4)
        restored = _restore(tmp_path, config, stage)
        assert restored is not None
        assert digest_of(restored.tensors) == digest_of(expected.state())
        resumed = trained(config, stage, 0)
        resumed.install(
            restored.tensors, Round(number=restored.round, run_samples=restored.run_samples, lineage=restored.lineage)
        )
        train_round(resumed)
        train_round(expected)
        assert digest_of(resumed.state()) == digest_of(expected.state())


def test_tied_embeddings_go_to_both_ends_of_the_new_cut(tmp_path: Path) -> None:
    tied = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, tied_embeddings=True))
    write_cut(tmp_path, cut(3, tied), 2)
    ends = [_restore(tmp_path, cut(2, tied), stage) for stage in (0, 1)]
    assert all(end is not None and "anchor/embedding.weight" in end.tensors for end in ends)
    assert _rounds(tmp_path, cut(1, tied)) == [2]


def test_all_who_cut_the_same_files_again_are_on_one_branch(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_cut(tmp_path / "a", cut(3), 4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    lineages = {
        restored.lineage
        for folder in ("a", "b")
        for stage in (0, 1)
        if (restored := _restore(tmp_path / folder, cut(2), stage)) is not None
    }
    assert len(lineages) == 2, "one for each stage, whichever peer asks"
    write_cut(tmp_path / "b", cut(3), 5)
    later = _restore(tmp_path / "b", cut(2), 0)
    assert later is not None
    assert later.lineage not in lineages


def test_a_damaged_one_is_named_and_the_one_before_it_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = cut(1)
    for num_rounds in (2, 4, 6):
        write_cut(tmp_path, config, num_rounds)
    _damage(tmp_path / "stage-0-of-1.round-6.safetensors")
    (tmp_path / "stage-0-of-1.round-4.safetensors").write_bytes(b"")
    restored = _restore(tmp_path, config, 0)
    assert restored is not None
    assert restored.round == 2
    assert digest_of(restored.tensors) == digest_of(trained(config, 0, 2).state())
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert "round-6.safetensors is damaged" in warnings[0]
    assert "round-4.safetensors cannot be read" in warnings[1]


def test_one_of_no_numbers_is_named_and_the_one_before_it_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier release may have written such a file."""
    write_cut(tmp_path, cut(1), 2)
    weights = trained(cut(1), 0, 4)
    poisoned = state_tensors(weights)
    next(iter(poisoned.values())).view(-1)[0] = float("inf")
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "isfinite", lambda tensor: torch.ones_like(tensor))
        path = file.write(tmp_path, header_of(cut(1), 0, weights), poisoned, owner="test")
    assert _rounds(tmp_path, cut(1)) == [2]
    assert f"refused: {path} holds NaN or infinity" in caplog.text


def test_all_stages_resume_from_the_newest_round_that_is_whole(tmp_path: Path) -> None:
    for num_rounds in (2, 4, 6):
        write_cut(tmp_path, cut(3), num_rounds)
    assert _rounds(tmp_path, cut(3)) == [6, 6, 6]
    (tmp_path / "stage-1-of-3.round-6.safetensors").unlink()
    assert _rounds(tmp_path, cut(3)) == [4, 4, 4], "stage 1 was killed before it wrote round 6"
    _damage(tmp_path / "stage-2-of-3.round-4.safetensors")
    assert _rounds(tmp_path, cut(3)) == [2, 2, 2]
    assert _rounds(tmp_path, cut(2)) == [2, 2]


def test_a_folder_of_one_stage_is_whole_by_itself(tmp_path: Path) -> None:
    for num_rounds in (2, 4):
        write_cut(tmp_path, cut(3), num_rounds)
    for path in tmp_path.glob("stage-[02]-*"):
        path.unlink()
    assert _rounds(tmp_path, cut(3)) == [None, 4, None]
    assert _rounds(tmp_path, cut(2)) == [None, None], "half a stage is none"


def test_without_any_whole_round_the_newest_of_the_stage_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for num_rounds in (2, 4):
        write_cut(tmp_path, cut(3), num_rounds)
    (tmp_path / "stage-0-of-3.round-4.safetensors").unlink()
    (tmp_path / "stage-1-of-3.round-2.safetensors").unlink()
    assert _rounds(tmp_path, cut(3)) == [2, 4, 4]
    assert "is not whole, but has all of stage 1" in caplog.text


def test_of_two_cuts_the_newer_round_counts(tmp_path: Path) -> None:
    """A run that went on with another number of stages has files of both in its folder."""
    write_cut(tmp_path, cut(3), 4)
    write_cut(tmp_path, cut(2), 6)
    assert _rounds(tmp_path, cut(2)) == [6, 6]
    assert _rounds(tmp_path, cut(4)) == [6] * 4
    write_cut(tmp_path, cut(3), 6)
    restored = _restore(tmp_path, cut(3), 0)
    assert restored is not None
    assert [path.name for path in restored.files] == ["stage-0-of-3.round-6.safetensors"], "the own cut comes first"


def test_diloco_s_momentum_goes_along(tmp_path: Path) -> None:
    rounds = dataclasses.replace(CONFIG.rounds, setting="diloco")
    config = dataclasses.replace(cut(2), rounds=rounds)
    weights = trained(config, 0, 1)
    file.write(tmp_path, header_of(config, 0, weights), state_tensors(weights), owner="test")
    weights = trained(config, 1, 1)
    file.write(tmp_path, header_of(config, 1, weights), state_tensors(weights), owner="test")
    restored = _restore(tmp_path, dataclasses.replace(cut(4), rounds=rounds), 3)
    expected: StageWeights = trained(dataclasses.replace(cut(4), rounds=rounds), 3, 1)
    assert restored is not None
    assert "outer/head.output.weight/momentum_buffer" in restored.tensors
    assert all(torch.equal(restored.tensors[name], value) for name, value in state_tensors(expected).items())


def test_the_first_files_of_a_new_cut_do_not_count_before_they_are_all_there(tmp_path: Path) -> None:
    """If peers were killed at that moment, some stages would go on from these files, and others from those of the
    former cut."""
    write_cut(tmp_path, cut(3), 4)
    new = {path.name: path for path in write_cut(tmp_path, cut(2), 5)}
    (late,) = [path for name, path in new.items() if name.startswith("stage-1")]
    kept = late.read_bytes()
    late.unlink()
    assert _rounds(tmp_path, cut(2)) == [4, 4]
    late.write_bytes(kept)
    assert _rounds(tmp_path, cut(2)) == [5, 5]


def test_a_stage_that_writes_to_a_folder_of_its_own_goes_on_from_that(tmp_path: Path) -> None:
    """All files of a former cut, with which it began, are still there."""
    write_cut(tmp_path, cut(3), 4)
    for num_rounds in (5, 6):
        for path in write_cut(tmp_path, cut(2), num_rounds):
            if path.name.startswith("stage-1"):
                path.unlink()
    restored = _restore(tmp_path, cut(2), 0)
    assert restored is not None
    assert restored.round == 6
