"""What fits where, before there is a run."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from peers.doctor import fit
from peers.doctor import program as doctor
from peers.doctor.options import DoctorOptions
from peers.shared import needs, stopping
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
        ("HuggingFaceTB/SmolLM2-360M", 16, _LARGE, {"fits", "fits if forwards are computed again"}),
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


def test_a_model_is_trained_further_with_two_moments(tmp_path: Path) -> None:
    config = _config(tmp_path, "HuggingFaceTB/SmolLM2-360M")
    for number, stage in enumerate(fit.of_stages(config, 1, on_gpu=True)):
        assert stage.needs.optimizer == 8 * needs.num_parameters(config, number)


def test_a_plan_says_which_stages_one_peer_may_serve_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_PUBLISHED["HuggingFaceTB/SmolLM2-360M"]))
    arguments = ["--model", str(tmp_path), "--stages", "4", "--device", "cpu", "--set", "data.microbatch_size=1"]
    doctor.main([*arguments, "--memory", "1TiB", "--json"])
    own, *gpus = json.loads(capsys.readouterr().out)["devices"]
    assert own["together"] == "0-3"
    assert own["free_bytes"] == 1 << 40
    lengths = [int(gpu["together"].partition("-")[2] or gpu["together"]) for gpu in gpus]
    assert lengths == sorted(lengths)
    assert doctor.main([*arguments, "--memory", "512MiB", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["devices"][0]["together"] is None


def _fine_tuned(folder: Path, size: str, lora_rank: int, setting: str) -> RunConfig:
    settings = f"rounds.setting={setting} averaging.codec=fp32 wire.dtype=bf16 data.microbatch_size=1"
    settings += " data.sequence_length=2048 model.autocast=off"
    stages = {"8B": 8, "70B": 20}[size]
    return _config(
        folder, f"meta-llama/Llama-3.1-{size}-Instruct", stages=stages, lora_rank=lora_rank, set=tuple(settings.split())
    )


def test_the_page_on_fine_tuning_has_the_figures_of_the_arithmetic(tmp_path: Path) -> None:
    rows: dict[str, list[str]] = {}
    for rank in (0, 16):
        figures: dict[str, list[str]] = {}
        for size in ("8B", "70B"):
            config, diloco = (_fine_tuned(tmp_path, size, rank, setting) for setting in ("synchronous", "diloco"))
            held = [sum(needs.state_bytes(one, 1).values()) / GIB for one in (config, diloco)]
            averaging = needs.averaging_bytes(config, 1, num_members=2) / GIB
            sent = 2 * needs.wire_bytes(config, 1)["output"] / 1e6
            averaged = needs.exchanged_bytes(config, 1, num_members=2) / 1e6
            for name, figure in {
                "GiB that a peer holds, synchronous; DiLoCo": f"{held[0]:.1f}; {held[1]:.1f}",
                "GiB besides, while a round is averaged": f"{averaging:.1f}",
                "GiB of a sample's graph, in float32": f"{needs.graph_bytes(config, 1) / GIB:.1f}",
                "MB that a peer sends for a sample; for a round's average": f"{sent:.1f}; {averaged:.0f}",
            }.items():
                figures.setdefault(name, []).append(figure)
        for name, (small, large) in figures.items():
            rows.setdefault(name, []).append(f"{small} ({large})")
    page = (Path(doctor.__file__).parents[2] / "docs" / "operations.md").read_text()
    for name, (all_weights, lora) in rows.items():
        assert f"\n| {name} | {all_weights} | {'the same' if lora == all_weights else lora} |\n" in page


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


@pytest.mark.parametrize("kind", ["anchored"])
def test_a_plan_may_have_bottlenecks(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("model.bottleneck_dim=8", f"model.bottleneck={kind}")
    given = [word for setting in settings for word in ("--set", setting)]
    assert doctor.main(["--preset", "tiny", "--device", "cpu", "--peers", "2", "--json", *given]) == 0
    plan = json.loads(capsys.readouterr().out)
    hidden = 32 * configs.load_preset("tiny").data.tokens_per_microbatch * 8 * 4
    assert plan["stages"][1]["sent"] == 2 * hidden + plan["stages"][1]["weights"] // 2
    assert plan["step_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--preset", "tiny", "--model", "x"], "exclude each other"),
        (["--stages", "2"], "belong to --model, --preset or --config"),
        (["--preset", "tiny", "--stages", "9"], "error: --stages (9) must not exceed model.num_layers (3)"),
        (["--preset", "tiny", "--stage", "7"], "--stage belongs to a run that is there"),
        (["--preset", "tiny", "--dht-port", "7"], "--dht-port belongs to a run that is there"),
        (["--preset", "tiny", "--set", "model.custom_class=a:B"], "only its code knows"),
    ],
)
def test_bad_plans_are_one_line(arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):  # for what the command line alone shows
        assert stopping.run_program("swarm-doctor", lambda: doctor.main(arguments)) == 2
    assert fault in capsys.readouterr().err
