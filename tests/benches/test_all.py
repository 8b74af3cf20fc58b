"""The bench `all`: the command lines of the others, and what is run again."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.shared import cli
from scripts.benches import __main__ as command
from scripts.benches import all as all_benches
from scripts.benches.all import Options, arguments_of
from scripts.benches.catalogue import MEASURING, module_of
from scripts.benches.shared import figures_file

FIGURES = {"figures": {"ratio": 1.0}}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the benches that would have been run. None of them is really run."""
    names: list[str] = []

    def measure(name: str, dataset: str) -> dict[str, Any]:
        names.append(name)
        return FIGURES

    monkeypatch.setattr(all_benches, "_measure", measure)
    return names


@pytest.mark.parametrize("name", MEASURING)
def test_the_command_line_is_understood(name: str) -> None:
    _, *arguments = arguments_of(name, "text.txt")
    options = cli.parse(module_of(name).Options, prog=name, argv=arguments)
    assert options.json
    assert getattr(options, "dataset", "text.txt") == "text.txt"


def test_figures_are_kept_with_their_version_and_errors_tried_again(
    tmp_path: Path, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all.json"
    before: figures_file.Entries = {
        "hop": {"version": "old", **FIGURES},
        "wire": {"version": "old", "error": "exit code 1"},
    }
    figures_file.write(out, before)
    all_benches.run(Options(out=out, only=("hop", "wire")))
    assert measured == ["wire"]
    found = figures_file.read(out)
    assert found["hop"] == before["hop"]
    assert found["wire"] == {**found["wire"], **FIGURES, "version": figures_file.version()}
    assert "hop is kept, OF ANOTHER VERSION (old;" in capsys.readouterr().err


@pytest.mark.parametrize(("outcome", "code"), [(FIGURES, 0), ({"error": "exit code 1"}, 1)])
def test_a_bench_that_fails_is_exit_code_1_and_in_the_file(
    outcome: dict[str, Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_benches, "_measure", lambda name, dataset: outcome)
    monkeypatch.setattr(sys, "argv", ["bench", "all", "--json", "--out", str(tmp_path / "all.json"), "--only", "hop"])
    assert command.main() == code
    assert outcome.items() <= figures_file.read(tmp_path / "all.json")["hop"].items()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_bench_of_one_text_waits_for_its_name_and_one_of_a_gpu_for_that(
    has_gpu: bool, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    left_out = {"nanogpt", "blocks"} | (set() if has_gpu else {"gpu"})
    all_benches.run(Options(out=tmp_path / "all.json"))
    assert measured == [name for name in MEASURING if name not in left_out]
    all_benches.run(Options(out=tmp_path / "all.json", dataset="shakespeare.txt"))
    assert measured[-2:] == ["nanogpt", "blocks"]


def test_what_cannot_be_written_is_noticed_before_anything_is_measured(tmp_path: Path, measured: list[str]) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        Options(out=tmp_path / "missing" / "all.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="is no file of figures"):
        Options(out=tmp_path / "list.json")
    with pytest.raises(ValueError, match="cannot read"):
        Options(out=tmp_path)
    assert not measured
