"""What options take, and what is said of anything else."""

import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import pytest

from peers import keys, meet
from peers.dashboard.program import DashboardOptions
from peers.doctor.options import DoctorOptions
from peers.generate.options import GenerateOptions
from peers.local.options import LocalOptions
from peers.model.options import COMMANDS
from peers.shared.cli import parse
from peers.stage_peer.options import PeerOptions
from peers.static.options import StaticOptions
from peers.status.program import StatusOptions
from peers.trainer.options import TrainerOptions

PROGRAMS: dict[str, list[type[Any]]] = {
    "swarm-peer": [PeerOptions],
    "swarm-trainer": [TrainerOptions],
    "swarm-status": [StatusOptions],
    "swarm-local": [LocalOptions],
    "swarm-keys": [keys.NewOptions, keys.IssueOptions, keys.ShowOptions],
    "swarm-meet": [meet.MeetOptions],
    "swarm-model": list(COMMANDS.values()),
    "swarm-generate": [GenerateOptions],
    "swarm-doctor": [DoctorOptions],
    "swarm-dashboard": [DashboardOptions],
    "swarm-static": [StaticOptions],
}
"""The options of each program, and of each command of one."""


def _kinds(annotation: Any) -> set[type]:
    """The types that an annotation is made of."""
    own = {annotation} if isinstance(annotation, type) else set[type]()
    return own.union(*map(_kinds, get_args(annotation)))


def _fields(options: type[Any]) -> Iterator[tuple[str, Any]]:
    """The name and type of each option, with all that the type says; those of a dataclass within the options are
    options too."""
    for name, annotation in get_type_hints(options, include_extras=True).items():
        if dataclasses.is_dataclass(annotation):
            yield from _fields(cast(type[Any], annotation))
        else:
            yield name, annotation


def _number_options() -> list[tuple[type[Any], str]]:
    """An option of each type that takes numbers, where the type says what it takes; all other ones with numbers."""
    by_type = dict[object, tuple[type[Any], str]]()
    for options in [one for of_program in PROGRAMS.values() for one in of_program]:
        for name, annotation in _fields(options):
            if _kinds(annotation) & {int, float}:
                says_what = "PrimitiveConstructorSpec" in repr(annotation)
                option = f"--{name.replace('_', '-')}"
                by_type[repr(annotation) if says_what else (options, name)] = (options, option)
    return list(by_type.values())


MEANT = {("--seed", "-1"), ("--temperature", str(10**30))}
"""What swarm-generate takes: a seed may be any number, and at a high temperature all tokens are equally likely."""


def _required(options: type[Any]) -> list[str]:
    """A command line with all that the options cannot do without."""
    words = list[str]()
    for field in dataclasses.fields(options):
        if field.default is field.default_factory is dataclasses.MISSING:
            is_positional = "Positional" in str(get_type_hints(options, include_extras=True)[field.name])
            choices = [word for word in get_args(field.type) if isinstance(word, str)]
            words += [*([] if is_positional else [f"--{field.name.replace('_', '-')}"]), choices[0] if choices else "x"]
    return words


def _refused(options: type[Any], argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a program refuses its command line."""
    with pytest.raises(SystemExit) as stop:
        parse(options, prog="swarm-x", argv=argv)
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err.removeprefix("swarm-x: error: ").removesuffix(" (see swarm-x --help)\n")


def test_every_program_is_among_these() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert PROGRAMS.keys() == project["scripts"].keys()


@pytest.mark.parametrize(("options", "option"), _number_options(), ids=lambda one: getattr(one, "__name__", one))
def test_every_number_that_an_option_cannot_take_is_refused_in_a_line_that_says_what_it_takes(
    options: type[Any], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("nan", "-1", str(10**30)):
        if options is GenerateOptions and (option, word) in MEANT:
            continue
        line = _refused(options, [*_required(options), option, word], capsys)
        assert re.match(rf"{option} takes a (size such|path's number|(whole )?number(,| from| above| of)) ", line)
        assert line.endswith(f", not {word!r}")


@pytest.mark.parametrize(
    ("options", "option", "word", "complaint"),
    [
        (PeerOptions, "--name", "x" * 65, "takes at most 64 characters, not 65"),
        (PeerOptions, "--name", "x\udcff", "takes UTF-8 text, and has the byte 0xff after 1 character"),
    ],
)
def test_a_text_is_refused_before_it_goes_anywhere(
    options: type[Any], option: str, word: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _refused(options, [option, word], capsys) == f"{option} {complaint}"
