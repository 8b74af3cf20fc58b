"""What fits where, before there is a run."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from peers.doctor import fit
from peers.doctor import program as doctor
from peers.doctor.options import DoctorOptions
from peers.shared import stopping
from swarm import config as configs
from swarm.config import RunConfig

GIB = 1 << 30
_FILE = json.loads((Path(__file__).parents[2] / "interchange" / "published.json").read_text())
_LARGE = {"set": ("data.microbatch_size=8",)}
_PUBLISHED = _FILE["found"] | _FILE["composed"]


def _config(folder: Path, name: str, **options: Any) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(_PUBLISHED[name]))
    return fit.planned(DoctorOptions(model=str(folder), **options))


@pytest.mark.parametrize(
    ("name", "gib", "options", "expected"),
    [
        # What a run begins with by itself fits on small GPUs.
        ("HuggingFaceTB/SmolLM2-360M", 11, {}, {"fits"}),
        ("HuggingFaceTB/SmolLM2-360M", 7, _LARGE, {"lacks 3.3 GiB", "lacks 4.2 GiB"}),
        ("meta-llama/Llama-3.1-8B-Instruct", 16, {"lora_rank": 16}, {"fits"}),
    ],
)
def test_stages_fit_or_lack_memory(
    name: str, gib: int, options: dict[str, Any], expected: set[str], tmp_path: Path
) -> None:
    stages = fit.of_stages(_config(tmp_path, name, **options), 1, on_gpu=True)
    assert {stage.verdict(gib * GIB) for stage in stages} == expected


@pytest.mark.parametrize(
    ("name", "gib", "num_together"),
    [
        ("HuggingFaceTB/SmolLM2-360M", 7, 1),
        ("meta-llama/Llama-3.1-8B-Instruct", 23, 2),
    ],
)
def test_settings_that_would_make_it_fit_do(name: str, gib: int, num_together: int, tmp_path: Path) -> None:
    config = _config(tmp_path, name, **_LARGE)
    assert not all(stage.needs.least <= gib * GIB for stage in fit.of_stages(config, 1, on_gpu=True))
    choices = fit.helpful(config, gib * GIB, 1, on_gpu=True)
    assert choices
    for settings in choices:
        assert len(settings) == num_together
        stages = fit.of_stages(configs.with_settings(config, settings), 1, on_gpu=True)
        assert all(stage.needs.least <= gib * GIB for stage in stages)
    assert not fit.helpful(config, GIB // 8, 1, on_gpu=True)


def test_a_plan_is_reported_with_a_measured_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--preset", "tiny", "--device", "cpu", "--peers", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    config = configs.load_preset("tiny")
    # Half of 64 microbatches, in float32, to the stage after it and the one before it; and half of a round's average.
    hidden = 32 * config.data.tokens_per_microbatch * config.model.d_model * 4
    averaged = plan["stages"][1]["weights"] // 2
    assert plan["stages"][1]["sent"] == 2 * hidden + averaged
    assert plan["step_seconds"] > 0
    assert plan["fits"]
    assert doctor.main(["--preset", "tiny", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "A step has 64 microbatches of 8 x 64 tokens." in text
    assert "a GPU of 24 GiB   23.0 GiB free  stages 0, 1, 2 fit; 0-2 together\n" in text


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--preset", "tiny", "--model", "x"], "exclude each other"),
        (["--preset", "tiny", "--stages", "9"], "error: --stages (9) must not exceed model.num_layers (3)"),
        (["--preset", "tiny", "--set", "model.custom_class=a:B"], "is measured of a run that is there"),
    ],
)
def test_bad_plans_are_one_line(arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):  # for what the command line alone shows
        assert stopping.run_program("swarm-doctor", lambda: doctor.main(arguments)) == 2
    assert fault in capsys.readouterr().err
