"""Command lines: dashes, one-line complaints, exit code 2."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import tyro

from peers.local.options import LocalOptions
from peers.shared.cli import arguments, parse
from peers.shared.option_types import FolderOrName
from peers.shared.stage_choice import StageChoice, StagesOrAuto
from peers.stage_peer.options import PeerOptions
from swarm.config import ModelConfig, RunConfig, with_settings


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Serve one stage."""

    stage: int
    """Stage to serve."""
    initial_peers: tuple[str, ...] = ()
    """Addresses of peers."""
    dataset: tyro.conf.UseAppendAction[tuple[FolderOrName, ...]] = ()
    """Texts, one a time."""
    output: Path | None = None
    """Folder for results."""
    log_level: Literal["debug", "info"] = "info"
    """What is logged."""
    insecure: bool = False
    """Do without TLS."""
    goes: StagesOrAuto = "auto"
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


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ("--stage x", "--stage takes a whole number of 64 bits, not 'x'"),
        (
            "--stage 1 --goes N",
            "--goes takes a stage (2), adjacent ones (1-3), a variant of one (2.1), all, or auto, not 'N'",
        ),
        ("", "missing --stage"),
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
    "options",
    [
        _Options(stage=0),
        _Options(stage=3, initial_peers=("a", "b"), output=Path("x y"), log_level="debug", insecure=True),
        _Options(stage=1, goes=StageChoice(5, 7)),
        _Options(stage=1, initial_peers=("a", "b"), invites=("c", "d e")),
    ],
)
def test_the_arguments_of_options_are_read_into_the_same_options(options: _Options) -> None:
    assert parse(_Options, prog="swarm-x", argv=arguments(options)) == options


@pytest.mark.parametrize("options", [PeerOptions, LocalOptions])
def test_a_preset_that_begins_with_a_model_is_that_model_with_its_settings(
    options: type[PeerOptions | LocalOptions],
) -> None:
    argv = ["--preset", "llama-1b-lora", "--dataset", "text.txt", "--set", "lora.rank=4"]
    read = parse(options, prog="swarm-x", argv=argv)
    assert (read.preset, read.model) == (None, "meta-llama/Llama-3.2-1B")
    config = with_settings(RunConfig(model=ModelConfig(num_layers=16, d_model=64)), read.set)
    assert config.run == "llama-1b-lora"
    assert config.lora.rank == 4, "what the user sets comes last"
    assert (config.model.num_layers, config.model.autocast) == (16, "bf16"), "the sizes are the model's"
    assert parse(options, prog="swarm-x", argv=[*argv, "--model", "copy"]).model == "copy"
