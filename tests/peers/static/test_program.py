"""swarm-static as a single process: faults, stops, and the files that it leaves."""

import dataclasses
import errno
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from peers.shared import logs
from peers.shared.sole_writer import require_sole_writer
from peers.shared.stopping import run_program
from peers.static import program, run_config
from peers.static.options import PROG, StaticOptions
from peers.static.workers import Shape
from scripts.benches.shared.common import with_corpus, write_config
from scripts.benches.sides.reference import Reference
from swarm import config as configs
from swarm.checkpoint import file
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
from swarm.data.microbatches import Microbatches
from swarm.interchange import weights
from swarm.interchange.export import export_model
from swarm.interchange.origin import from_checkpoints
from swarm.interchange.run_folder import ImportOptions, import_model
from swarm.interchange.source import Source
from swarm.machine import tensor_file
from swarm.metrics import read as read_metrics
from swarm.metrics import read_current
from swarm.model.stages import parameter_shapes, trained_shapes
from swarm.stage import state
from swarm.training import scaling
from swarm.types import Block
from tests.interchange.small_models import save
from tests.support.locked import OWNER
from tests.support.swarm import wait_until
from tests.support.tokenizers import write_tokenizer

CONFIG = RunConfig(
    run="alone",
    model=ModelConfig(num_layers=2, d_model=32, num_heads=2),
    stages=StagesConfig(num_stages=2),
    data=DataConfig(sequence_length=16, microbatch_size=2, max_tokens=50_000),
    rounds=RoundsConfig(setting="synchronous", round_samples=4),
    optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.1),
)


OptimizerName = Literal["adamw", "muon"]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    write_config(CONFIG, tmp_path / "run.toml")
    return tmp_path / "run.toml"


@pytest.fixture(autouse=True)
def _plain_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's own logging stays as pytest has it."""
    monkeypatch.setattr(logs, "setup_logging", lambda name, level: None)


def static(*arguments: str | Path | int) -> int:
    """Run swarm-static, and return its exit code."""
    return run_program(PROG, lambda: program.main([str(argument) for argument in arguments]))


def trained(config_file: Path, *arguments: str | Path | int) -> int:
    folder = config_file.parent
    return static(
        "--config", config_file, "--metrics", folder / "metrics.jsonl", "--evaluate-every", 0,
        "--evaluation-samples", 4, *arguments,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "arguments", "expected"),
    [
        (1, [], "which run?"),
        (1, ["--preset", "tiny", "--fsdp", "zero1"], "zero1"),
        (1, ["--preset", "tiny", "--dp", "2"], "takes 2 workers, and there is one: start it as torchrun"),
        (3, ["--preset", "tiny", "--tp", "2"], "takes 2 workers, and there are 3"),
        (1, ["--preset", "tiny", "--fsdp", "zero3"], "--fsdp cuts weights over the --dp workers"),
        (1, ["--fsdp", "--preset", "tiny"], "--fsdp cuts weights over the --dp workers"),
        (1, ["--preset", "tiny", "--fsdp"], "--fsdp cuts weights over the --dp workers"),
        (1, ["--preset", "tiny", "--compress", "int8"], "--compress is for what --dp workers send"),
        (4, ["--preset", "tiny", "--tp", "2", "--compress", "int8"], "--compress is for --dp alone"),
        (
            3,
            ["--preset", "tiny", "--tp", "3"],
            "--tp 3 cuts layers as model.block_types = 'tp' does, and model.num_heads",
        ),
        (9, ["--preset", "tiny", "--pp", "9"], "--pp 9 needs as many layers"),
        (2, ["--preset", "tiny", "--dtype", "fp16", "--compress", "int8"], "--compress is not for --dtype fp16"),
        (2, ["--preset", "tiny", "--device", "mps"], "--device mps is for one worker: start swarm-static without"),
        (1, ["--preset", "none"], "unknown preset"),
        (1, ["--preset", "tiny", "--set", "optimizer.lr=1"], "--set: unknown key 'optimizer.lr'"),
        (1, ["--preset", "tiny", "--resume", "/nowhere"], "--resume /nowhere: there is no such folder"),
        (1, ["--preset", "tiny", "--resume", "/dev"], "--resume /dev: there is no checkpoint in this folder"),
        (1, ["--preset", "tiny", "swarm://1abc"], "takes no such word: swarm://1abc"),
    ],
)
def test_a_fault_is_one_line(
    workers: int,
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if workers > 1:
        monkeypatch.setenv("WORLD_SIZE", str(workers))
    try:
        code = static(*arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    error = capsys.readouterr().err
    assert code == 2
    assert expected in error
    assert error.count("\n") == 1


MISFITS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"block_types": "spd", "num_shards": 2}, {"tp": 3}, "--tp 3 does not divide model.num_shards, which is 2"),
    ({"block_types": "parallel", "num_shards": 2}, {"tp": 2}, "parallel blocks meet at the ends of the run's 2 stages"),
    ({"bottleneck_dim": 8}, {"tp": 2}, "--tp 2 cuts layers as model.block_types = 'tp' does, and model.block_types is"),
    ({"custom_class": "some.module:Class"}, {"tp": 2}, "--pp and --tp are for the built-in model"),
    ({"custom_class": (("a:B", "c:D"),)}, {}, "names several classes, and swarm-static trains a model of one"),
    ({"dropout": 0.1}, {"compile": "on"}, "--compile on is not for runs with dropout"),
    ({"weights": 64 * "a"}, {}, "the run begins with a model (model.weights): give --model with its folder"),
]


@pytest.mark.parametrize(("model", "options", "expected"), MISFITS)
def test_a_run_that_does_not_fit_the_options_is_one_line(
    model: dict[str, Any], options: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    write_config(dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, **model)), tmp_path / "run.toml")
    given = StaticOptions(config=tmp_path / "run.toml", **options)
    with pytest.raises(ValueError, match=re.escape(expected)):
        run_config.trained(given, Shape(dp=1, tp=given.tp, pp=1), torch.device("cpu"))


def test_other_workers_of_a_machine_do_not_repeat_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert static("--preset", "tiny", "--tp", "2") == 2
    assert capsys.readouterr().err == ""


def test_goes_on_from_its_checkpoint_which_is_a_swarms_too(config_file: Path) -> None:
    folder = config_file.parent / "checkpoints"
    options = ("--checkpoint", folder, "--checkpoint-every", 2, "--keep-checkpoints", 1)
    assert trained(config_file, "--steps", 3, *options) == 0
    assert trained(config_file, "--steps", 5, *options) == 0

    config, data = with_corpus(CONFIG)
    reference = Reference(config, data)
    losses = [reference.step(step) for step in range(5)]
    rows = read_current(config_file.parent / "metrics.jsonl")
    assert [row["train/loss"] for row in rows if "train/loss" in row] == pytest.approx(losses, abs=1e-5)
    for stage in range(2):
        restored = CheckpointFolder(folder, config).restore(Block(stage), trained_shapes(config, stage))
        assert restored is not None
        assert (restored.round, restored.run_samples, restored.highest_microbatch) == (5, 20, 9)
        anchor, remembered = state.parts(restored.tensors)
        for name, value in anchor.items():
            torch.testing.assert_close(value, reference.weights[name], rtol=0, atol=1e-6)
            assert float(remembered[f"{name}/step"]) == 5


def test_goes_on_from_an_amended_run_at_its_place_of_the_text(
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, rounds = config_file.parent / "checkpoints", dataclasses.replace(CONFIG.rounds, round_samples=8)
    assert trained(config_file, "--steps", 2, "--checkpoint", folder) == 0
    path = folder / "stage-0-of-1.round-2.safetensors"
    locked = dataclasses.replace(CONFIG, owner=OWNER.authority.fingerprint)
    timeline = Timeline(dataclasses.replace(file.config_of(path), owner=locked.owner))
    for number, size in ((2, 8), (9, 16)):
        setting = f"rounds.round_samples={size}"
        timeline.add([*timeline.texts, Amendment.sign(OWNER, timeline, number, [setting]).text])
    header = dataclasses.replace(
        file.read_header(path, timeline.config), config=timeline.config, amendments=timeline.texts
    )
    file.write(folder, header, file.load(path, file.parameters(path)), owner="test")
    taken, samples = list[int](), Microbatches.samples

    def noted(data: Microbatches, number: int) -> dict[str, torch.Tensor]:
        taken.append(number)
        return samples(data, number)

    monkeypatch.setattr(Microbatches, "samples", noted)
    write_config(locked, config_file)
    assert trained(config_file, "--steps", 3, "--checkpoint", folder) == 1
    assert "it goes on as amended: rounds.round_samples is 8 in it and 4 here" in capsys.readouterr().err
    assert taken == []
    write_config(dataclasses.replace(CONFIG, rounds=rounds), config_file)
    assert trained(config_file, "--steps", 3, "--checkpoint", folder) == 0
    # Two rounds of two microbatches went before, and the next step's are made while this one is computed.
    assert taken[:8] == [4, 5, 6, 7, 8, 9, 10, 11]
    assert "do not count here: amendment 2: rounds.round_samples=16 from round 9 on" in caplog.text
    assert file.read_header(path.with_name("stage-0-of-1.round-3.safetensors"), timeline.at(2)).highest_microbatch == 7


def test_its_checkpoints_have_the_tokenizer_that_an_export_needs(config_file: Path) -> None:
    folder, model = config_file.parent, dataclasses.replace(CONFIG.model, vocab_size=64)
    write_tokenizer(folder / "own" / "tokenizer.json", ["one", "two"])
    write_config(dataclasses.replace(CONFIG, model=model), config_file)
    (folder / "text.txt").write_text("one two " * 2000)
    text = ("--dataset", folder / "text.txt", "--tokenizer", folder / "own")
    assert trained(config_file, "--steps", 1, *text, "--checkpoint", folder / "checkpoints") == 0
    export_model(from_checkpoints(folder / "checkpoints", None), folder / "out")
    assert (folder / "out" / "tokenizer.json").read_text() == (folder / "own" / "tokenizer.json").read_text()


def test_begins_with_a_model_and_goes_on_from_a_checkpoint_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("llama-2", tmp_path / "model")
    data = dataclasses.replace(CONFIG.data, sequence_length=16)
    import_model(Source(tmp_path / "model"), tmp_path / "run", ImportOptions(num_stages=1))
    imported = configs.load(tmp_path / "run" / "run.toml")
    # Otherwise the rate would fall until the last step, which is another one in the second part.
    optimizer = dataclasses.replace(CONFIG.optimizer, schedule="constant", warmup_samples=0)
    config = dataclasses.replace(CONFIG, model=imported.model, stages=imported.stages, data=data, optimizer=optimizer)
    write_config(config, tmp_path / "run.toml")
    options = ("--model", tmp_path / "run", "--checkpoint", tmp_path / "checkpoints")
    assert trained(tmp_path / "run.toml", "--steps", 1, *options) == 0
    assert trained(tmp_path / "run.toml", "--steps", 2, *options) == 0

    complete, microbatches = with_corpus(config)
    given = weights.open_folder(tmp_path / "run" / "weights").load(parameter_shapes(config, 0))
    reference = Reference(complete, microbatches)
    reference.load(given)
    rows = read_current(tmp_path / "metrics.jsonl")
    found = [row["train/loss"] for row in rows if "train/loss" in row]
    assert found == pytest.approx([reference.step(0), reference.step(1)], abs=1e-5)

    save("llama-linear", tmp_path / "another model")
    import_model(Source(tmp_path / "another model"), tmp_path / "another", ImportOptions())
    assert trained(tmp_path / "run.toml", "--steps", 3, "--model", tmp_path / "another") == 1
    assert "another/weights has other weights" in capsys.readouterr().err


@pytest.mark.parametrize(("before", "now"), [("adamw", "muon"), pytest.param("muon", "adamw", marks=pytest.mark.slow)])
def test_another_optimizer_goes_on_from_the_weights_and_says_so(
    before: OptimizerName, now: OptimizerName, config_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = config_file.parent / "checkpoints"
    for name, steps in ((before, 2), (now, 4)):
        optimizer = dataclasses.replace(CONFIG.optimizer, name=name)
        write_config(dataclasses.replace(CONFIG, optimizer=optimizer), config_file)
        assert trained(config_file, "--steps", steps, "--checkpoint", folder) == 0
    assert f"optimizer.name: '{before}' before, '{now}' now" in caplog.text
    assert max(row["step"] for row in read_metrics(config_file.parent / "metrics.jsonl")) == 4


def test_a_last_checkpoint_that_is_not_written_is_a_failure(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(stream: tensor_file.Stream, tensor: torch.Tensor) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensor_file.Stream, "add", full)
    assert trained(config_file, "--steps", 2, "--checkpoint", config_file.parent / "checkpoints") == 1
    assert "step 2 could not be written" in capsys.readouterr().err


def test_figures_that_a_full_disk_lost_are_not_said_to_be_there(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = os.write

    def full(descriptor: int, data: bytes) -> int:
        return 0 if b"train/loss" in data else written(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    assert trained(config_file, "--steps", 2) == 0
    assert "; some figures, and others are lost, in " in capsys.readouterr().out


@pytest.mark.parametrize("option", ["metrics", "checkpoint"])
def test_two_runs_do_not_write_to_the_same_place(
    option: str, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("metrics.jsonl" if option == "metrics" else "checkpoints")
    assert trained(config_file, "--steps", 1, "--checkpoint", tmp_path / "checkpoints") == 0
    other = require_sole_writer(path, "the other run's")
    try:
        assert trained(config_file, "--steps", 2, "--checkpoint", tmp_path / "checkpoints") == 2
    finally:
        os.close(other)
    assert f"--{option} {path} is in use by another process on this machine" in capsys.readouterr().err
    assert trained(config_file, "--steps", 2, "--checkpoint", tmp_path / "checkpoints") == 0


def test_a_run_that_is_at_its_end_says_so(config_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = config_file.parent / "checkpoints"
    assert trained(config_file, "--steps", 3, "--checkpoint", folder) == 0
    with caplog.at_level("INFO"):
        assert trained(config_file, "--steps", 2, "--checkpoint", folder) == 0
    assert "is at step 3, and was to train to 2: that counts from the run's beginning" in caplog.text


def test_refuses_checkpoints_of_another_model(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config_file.parent / "checkpoints"
    assert trained(config_file, "--steps", 1, "--checkpoint", folder) == 0
    write_config(dataclasses.replace(CONFIG, model=ModelConfig(num_layers=2, d_model=64, num_heads=2)), config_file)
    capsys.readouterr()
    assert trained(config_file, "--steps", 2, "--checkpoint", folder) == 1
    assert "they are of another run (model.d_model is 32 in it and 64 here" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_narrow_types_learn_as_fp32_does(dtype: str, config_file: Path) -> None:
    def last_loss(*arguments: str) -> float:
        assert trained(config_file, "--steps", "8", *arguments) == 0
        rows = read_current(config_file.parent / "metrics.jsonl")
        return float([row["train/loss"] for row in rows if "train/loss" in row][-1])

    assert last_loss("--dtype", dtype) == pytest.approx(last_loss(), rel=0.01)


def test_a_step_that_overflows_float16_is_computed_again(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scaling, "MEAN_SCALE", 2.0**24)
    with caplog.at_level("INFO"):
        assert trained(config_file, "--steps", 5, "--dtype", "fp16") == 0
    assert "overflows float16 and is computed again: the loss scale is now 8.38861e+06" in caplog.text
    reference = Reference(*with_corpus(CONFIG))
    rows = read_current(config_file.parent / "metrics.jsonl")
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses == pytest.approx([reference.step(step) for step in range(5)], rel=5e-3)


def test_diloco_is_trained_by_inner_batches(config_file: Path) -> None:
    rounds = RoundsConfig(setting="diloco", round_samples=8, inner_batch_samples=2)
    write_config(dataclasses.replace(CONFIG, rounds=rounds), config_file)
    assert trained(config_file, "--steps", 2) == 0
    rows = read_current(config_file.parent / "metrics.jsonl")
    tokens = [row["train/total_tokens"] for row in rows if "train/loss" in row]
    assert tokens == [2 * 16, 4 * 16]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_after_the_step_with_a_checkpoint(
    number: signal.Signals, code: int, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, metrics = config_file.parent / "checkpoints", config_file.parent / "metrics.jsonl"

    def press_after_a_step() -> None:
        wait_until(lambda: metrics.exists() and "train/loss" in metrics.read_text(), 60.0, "a step")
        os.kill(os.getpid(), number)

    pressing = threading.Thread(target=press_after_a_step)
    pressing.start()
    assert trained(config_file, "--steps", 1_000_000, "--checkpoint", folder) == code
    pressing.join()
    found = re.search(r"stopped at step (\d+)", capsys.readouterr().out)
    assert found is not None
    assert int(found[1]) > 0
    assert (folder / f"stage-0-of-1.round-{found[1]}.safetensors").exists()
