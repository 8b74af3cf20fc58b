"""Command lines: dashes, one-line complaints, exit code 2."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import tyro

from peers.dashboard.options import DashboardOptions
from peers.doctor.options import DoctorOptions
from peers.generate.options import GenerateOptions
from peers.local.options import LocalOptions
from peers.model.options import ExportModelOptions, ImportModelOptions
from peers.shared.cli import (
    arguments,
    parse,
    require_distinct,
    require_kinds,
    require_known,
    require_ports,
    require_positive,
)
from peers.stage_peer.options import PeerOptions
from peers.static.options import StaticOptions
from peers.trainer.options import TrainerOptions
from swarm.config import ModelConfig, RunConfig, with_settings


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Serve one stage."""

    stage: int
    """Stage to serve."""
    initial_peers: tuple[str, ...] = ()
    """Addresses of peers."""
    dataset: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Texts, one a time."""
    output: Path | None = None
    """Folder for results."""
    log_level: Literal["debug", "info"] = "info"
    """What is logged."""
    insecure: bool = False
    """Do without TLS."""
    goes: int | Literal["auto"] = 0
    """Where to."""
    every: int | None = None
    """Rounds."""
    invites: tyro.conf.Positional[tuple[str, ...]] = ()
    """To runs."""
    seconds: float = 1.0
    """To wait."""

    def __post_init__(self) -> None:
        if self.stage < 0:
            raise ValueError(f"--stage must not be negative, not {self.stage}")


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """Show what is in a file."""

    file: tyro.conf.Positional[Path]
    """File to show, as with --output of another program."""
    stage: int
    """Stage to show; a line so long that it does not fit into one of the box, and so goes on in the next one of it."""


@dataclass(frozen=True, kw_only=True)
class _Repeated:
    """Read a file and some more."""

    file: tyro.conf.Positional[str]
    """The file."""
    dataset: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """The others."""


def test_options_are_read() -> None:
    argv = ["--stage", "1", "--initial-peers", "a:1", "b:2", "--insecure", "--log-level", "debug", "--stage", "2"]
    expected = _Options(stage=2, initial_peers=("a:1", "b:2"), insecure=True, log_level="debug")
    assert parse(_Options, prog="swarm-x", argv=argv) == expected


def test_an_option_may_be_given_several_times_and_takes_no_more_than_one_each_time() -> None:
    argv = ["--dataset", "a", "--stage", "1", "--dataset", "b"]
    assert parse(_Options, prog="swarm-x", argv=argv).dataset == ("a", "b")
    positional = parse(_Repeated, prog="swarm-x", argv=["--dataset", "a", "b"])
    assert positional == _Repeated(file="b", dataset=("a",))


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ("--stage 1 --foo 3", "unrecognized options: --foo, 3"),
        ("--stage 1 --insecur", "unrecognized options: --insecur; did you mean --insecure?"),
        (
            "--stage 1 --insecur --log-leve info",
            "unrecognized options: --insecur, --log-leve, info; did you mean --insecure or --log-level?",
        ),
        ("--stage x", "--stage takes a whole number, not 'x'"),
        ("--stage 1 --goes N", "--goes takes a whole number or auto, not 'N'"),
        ("--stage 1 --every x", "--every takes a whole number, not 'x'"),
        ("--stage 1 --seconds soon", "--seconds takes a number, not 'soon'"),
        ("", "missing --stage"),
        ("--stag 1", "unrecognized options: --stag 1"),
        ("--stage", "missing value for argument '--stage'. Expected 1 values."),
        ("--stage -1", "--stage must not be negative, not -1"),
        ("--stage 1 --output=", "--output takes a path, not ''"),
        (
            "--stage 1 --log-level loud",
            "--log-level takes debug or info, not 'loud'",
        ),
    ],
)
def test_a_wrong_line_is_one_line(argv: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(_Options, prog="swarm-x", argv=argv.split())
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"swarm-x: error: {complaint} (see swarm-x --help)\n"


@pytest.mark.parametrize(
    ("options", "argv", "complaint"),
    [
        (_Arguments, ["", "--stage", "1"], "PATH takes a path, not ''"),
        (_Options, ["--stage", "1", "--dataset", "a", "--dataset", ""], "--dataset takes a path or a name, not ''"),
        (PeerOptions, ["--checkpoint", ""], "--checkpoint takes a path, not ''"),
        (StaticOptions, ["--model", ""], "--model takes a path or a name, not ''"),
        (DashboardOptions, ["swarm://1x", "--history", ""], "--history takes a path, not ''"),
        (GenerateOptions, ["--checkpoint", "", "--prompt", "a"], "--checkpoint takes a path, not ''"),
        (TrainerOptions, ["--output", ""], "--output takes a path, not ''"),
        (ExportModelOptions, ["--output", ""], "--output takes a path, not ''"),
    ],
)  # fmt: skip
def test_an_empty_path_is_not_taken_for_the_current_folder(
    options: type[object], argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(options, prog="swarm-x", argv=argv)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"swarm-x: error: {complaint} (see swarm-x --help)\n"


@pytest.mark.parametrize(
    ("argv", "complaint"), [("", "missing PATH, --stage"), ("x", "missing --stage"), ("--stage 1", "missing PATH")]
)
def test_what_is_missing_is_named_and_nothing_else(
    argv: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Positional arguments are named by what they take. Options that an explanation mentions are not named."""
    with pytest.raises(SystemExit):
        parse(_Arguments, prog="swarm-x", argv=argv.split())
    assert capsys.readouterr().err == f"swarm-x: error: {complaint} (see swarm-x --help)\n"


def test_help_shows_the_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(_Options, prog="swarm-x", argv=["--help"])
    assert stop.value.code == 0
    captured = capsys.readouterr()
    assert "Addresses of peers." in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    "options",
    [
        _Options, DashboardOptions, DoctorOptions, ExportModelOptions, GenerateOptions, ImportModelOptions,
        LocalOptions, PeerOptions, StaticOptions, TrainerOptions,
    ],
)  # fmt: skip
def test_help_names_neither_nothing_as_a_value_nor_as_a_default(
    options: type[object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        parse(options, prog="swarm-x", argv=["--help"])
    said = capsys.readouterr().out
    assert "None" not in said
    assert "(default: )" not in said
    assert "(default: '')" not in said


def test_help_shows_what_an_option_takes_and_what_may_be_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for options in (PeerOptions, StaticOptions):
        with pytest.raises(SystemExit):
            parse(options, prog="swarm-x", argv=["--help"])
    said = capsys.readouterr().out
    assert "without one a new run begins." in said, "it has no line breaks of its own"
    lines = " ".join(said.split())
    for shown in (
        "[INVITE]", "--preset STR", "--stage INT|{auto}", "--fsdp {zero3,zero2}", "--lora-targets STR [STR ...]",
        "(repeatable)", "(default: 127.0.0.1)",
    ):  # fmt: skip
        assert shown in lines


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_what_has_to_be_positive_is_finite_as_well(value: float) -> None:
    require_positive(SimpleNamespace(some_seconds=0.5), ["some_seconds"])
    with pytest.raises(ValueError, match=f"^--some-seconds must be positive, not {value}$"):
        require_positive(SimpleNamespace(some_seconds=value), ["some_seconds"])


def test_a_list_of_names_has_known_ones_alone() -> None:
    require_known(SimpleNamespace(some_names=("a", "b")), "some_names", ("a", "b", "c"))
    require_known(SimpleNamespace(some_names=()), "some_names", ("a",), at_least=0)
    with pytest.raises(ValueError, match=r"^--some-names: 'd' is none of a, b$"):
        require_known(SimpleNamespace(some_names=("a", "d")), "some_names", ("a", "b"))
    with pytest.raises(ValueError, match=r"^--some-names needs at least one name$"):
        require_known(SimpleNamespace(some_names=()), "some_names", ("a",))


@pytest.mark.parametrize("values", [(), ("a", "b", "a")])
def test_a_list_names_something_and_nothing_twice(values: tuple[str, ...]) -> None:
    require_distinct(SimpleNamespace(some_names=("a", "b")), ["some_names"])
    with pytest.raises(ValueError, match=r"^--some-names must name at least one, and none twice$"):
        require_distinct(SimpleNamespace(some_names=values), ["some_names"])


@pytest.mark.parametrize(
    "options",
    [
        _Options(stage=0),
        _Options(stage=3, initial_peers=("a", "b"), output=Path("x y"), log_level="debug", insecure=True),
        _Options(stage=1, goes="auto", every=7, seconds=0.25, dataset=("a", "b c")),
        _Options(stage=1, goes=5),
        _Options(stage=1, initial_peers=("a", "b"), invites=("c", "d e")),
    ],
)
def test_the_arguments_of_options_are_read_into_the_same_options(options: _Options) -> None:
    assert parse(_Options, prog="swarm-x", argv=arguments(options)) == options


def test_the_default_needs_no_argument() -> None:
    assert arguments(_Options(stage=0)) == ["--stage", "0"]


@pytest.mark.parametrize("port", [None, 0, 65535])
def test_a_port_or_none_is_taken(port: int | None) -> None:
    require_ports(SimpleNamespace(some_port=port), ["some_port"])


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=f"--some-port must be between 0 and 65535, not {port}"):
        require_ports(SimpleNamespace(some_port=port), ["some_port"])


def test_a_file_and_a_folder_do_not_take_each_others_place(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    given = SimpleNamespace(some_file=tmp_path, some_folder=file, left_out=None, to_come=tmp_path / "to-come")
    with pytest.raises(ValueError, match=f"^--some-file {tmp_path} is a folder: it takes a file$"):
        require_kinds(given, files=["some_file"])
    with pytest.raises(ValueError, match=f"^--some-folder {file} is no folder$"):
        require_kinds(given, folders=["some_folder"])
    both = ["left_out", "to_come"]
    require_kinds(given, files=[*both, "some_folder"], folders=[*both, "some_file"])


@pytest.mark.parametrize("preset", ["gpt2-124m", "gpt2-355m", "llama-124m", "shakespeare", "smollm2", "llama-7b-lora"])
def test_a_preset_that_needs_a_text_says_which_before_anything_begins(
    preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(PeerOptions, prog="swarm-peer", argv=["--preset", preset])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert f"--preset {preset} needs " in said
    assert "--dataset" in said or "hf:" in said
    assert parse(PeerOptions, prog="swarm-peer", argv=["--preset", preset, "--dataset", "text.txt"]).names_a_run


@pytest.mark.parametrize("options", [PeerOptions, LocalOptions, StaticOptions])
def test_a_preset_that_begins_with_a_model_is_that_model_with_its_settings(
    options: type[PeerOptions | LocalOptions | StaticOptions],
) -> None:
    argv = ["--preset", "llama-1b-lora", "--dataset", "text.txt", "--set", "lora.rank=4"]
    read = parse(options, prog="swarm-x", argv=argv)
    assert (read.preset, read.model) == (None, "meta-llama/Llama-3.2-1B")
    config = with_settings(RunConfig(model=ModelConfig(num_layers=16, d_model=64)), read.set)
    assert config.run == "llama-1b-lora"
    assert config.lora.rank == 4, "what the user sets comes last"
    assert (config.model.num_layers, config.model.autocast) == (16, "bf16"), "the sizes are the model's"
    assert parse(options, prog="swarm-x", argv=[*argv, "--model", "copy"]).model == "copy"


def test_a_preset_that_draws_its_weights_begins_with_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(PeerOptions, prog="swarm-peer", argv=["--preset", "tiny", "--model", "copy"])
    assert "--preset tiny and --model exclude each other" in capsys.readouterr().err
