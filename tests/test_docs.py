"""README and docs/ name only what exists: files, commands, options, calls, metrics."""

import dataclasses
import functools
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import pytest

from peers.dashboard.program import DashboardOptions
from peers.doctor.options import DoctorOptions
from peers.generate.options import GenerateOptions
from peers.keys import AmendOptions, IssueOptions, TokensOptions
from peers.local.options import LocalOptions
from peers.model.options import ExportModelOptions, ImportModelOptions, PushModelOptions, RouteModelOptions
from peers.shared import cli
from peers.stage_peer.options import PeerOptions
from peers.static.options import StaticOptions
from peers.status.program import StatusOptions
from peers.trainer.options import TrainerOptions
from scripts.benches import __main__ as bench
from scripts.benches.chaos import __main__ as chaos
from scripts.benches.chaos.__main__ import Options as ChaosOptions
from scripts.benches.shared.common import BenchOptions, OutputOptions
from scripts.benches.simulate import __main__ as simulate

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "AGENTS.md", ROOT / "SKILL.md", *sorted((ROOT / "docs").glob("*.md"))]
_PROGRAMS: dict[str, type] = {
    "swarm-peer": PeerOptions,
    "swarm-trainer": TrainerOptions,
    "swarm-static": StaticOptions,
    "swarm-status": StatusOptions,
    "swarm-doctor": DoctorOptions,
    "swarm-dashboard": DashboardOptions,
    "swarm-keys amend": AmendOptions,
    "swarm-keys tokens": TokensOptions,
    "swarm-keys issue": IssueOptions,
    "swarm-generate": GenerateOptions,
    "swarm-model import": ImportModelOptions,
    "swarm-model export": ExportModelOptions,
    "swarm-model push": PushModelOptions,
    "swarm-model route": RouteModelOptions,
    "swarm-local": LocalOptions,
    "scripts/demo": LocalOptions,
    "scripts/bench": BenchOptions,
    "scripts/chaos": ChaosOptions,
    "scripts/simulate": OutputOptions,
}
ELSEWHERE = frozenset(
    ("--nproc-per-node", "--nnodes", "--no-python", "--max-restarts", "--rdzv-backend", "--rdzv-endpoint", "--tasks")
)
"""Options of torch's launcher and of lm-eval."""
MAINS = {"scripts/bench": bench.main, "scripts/chaos": chaos.main, "scripts/simulate": simulate.main}
SHOWN = {"performance.md": bench.BENCHES, "simulation.md": simulate.STUDIES}
"""What a page has a command of, for each; NAME stands for all of them."""

_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_COMMAND = re.compile(rf"^    ({'|'.join(MAINS)}) (.+)$", re.MULTILINE)
_OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]*(?=\s|$)")


def _code(text: str) -> Iterator[str]:
    """Code spans, and the lines of code blocks."""
    for block in _FENCE.findall(text):
        yield from block.splitlines()[1:-1]
    yield from (span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", _FENCE.sub("", text)))


def _anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@functools.cache
def _options() -> dict[str, type]:
    """The options of each program and bench."""
    return _PROGRAMS | {f"scripts/bench {name}": bench.module_of(name).Options for name in bench.BENCHES}


@functools.cache
def _flags(options: type) -> set[str]:
    """The options of a program, those of a dataclass among its fields (such as Sampling) included."""
    found = {"--help"}
    for name, kind in get_type_hints(options).items():
        found |= (
            _flags(kind)
            if isinstance(kind, type) and dataclasses.is_dataclass(kind)
            else {f"--{name.replace('_', '-')}"}
        )
    return found


def test_relative_links_resolve() -> None:
    for page in PAGES:
        for link in _LINK.findall(_FENCE.sub("", page.read_text())):
            if "://" in link:
                continue
            path, _, fragment = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), (page.name, link)
            assert not fragment or fragment in _anchors(target), (page.name, link)


def test_paths_in_code_exist() -> None:
    path = re.compile(r"(swarm|peers|scripts|docs|tests|proto)/[\w./-]+")
    named = {
        word for page in PAGES for span in _code(page.read_text()) for word in span.split() if path.fullmatch(word)
    }
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_options_exist() -> None:
    """An option behind a program's name must be one of that program's, and any other option must be some program's."""
    options = _options()
    program = re.compile("|".join(map(re.escape, sorted(options, key=len, reverse=True))))
    every = ELSEWHERE.union(*map(_flags, options.values()))
    for page in PAGES:
        for span in _code(page.read_text()):
            starts = [match.start() for match in program.finditer(span)]
            pieces = [span[start:end] for start, end in zip([0, *starts], [*starts, len(span)], strict=True)]
            for piece in pieces:
                match = program.match(piece)
                known = _flags(options[match[0]]) if match else every
                assert set(_OPTION.findall(piece)) <= known, (page.name, span)


def test_commands_on_lines_of_their_own_are_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The programs themselves parse their options; nothing is run. A page has a command for each bench or study."""
    parse = cli.parse

    def parse_only(options: type, *, prog: str, argv: Sequence[str]) -> NoReturn:
        parse(options, prog=prog, argv=argv)
        raise InterruptedError("nothing is run")

    monkeypatch.setattr(cli, "parse", parse_only)
    monkeypatch.chdir(tmp_path)
    for page in PAGES:
        named, shown = set(), SHOWN.get(page.name, {})
        for program, line in _COMMAND.findall(page.read_text()):
            first, *options = line.split()
            named.add(first)
            for name in shown if first == "NAME" else [first]:
                monkeypatch.setattr(sys, "argv", [program, name, *options])
                with pytest.raises(InterruptedError):
                    MAINS[program]()
        assert shown.keys() <= named, page.name


def test_the_figures_of_status_are_those_of_the_programs() -> None:
    """docs/status.md tells of every figure; scripts/generate_status_docs writes it."""
    script: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "generate_status_docs"))
    assert (ROOT / "docs" / "status.md").read_text() == script["page"](), "run scripts/generate_status_docs"


def test_the_page_about_the_configuration_is_current() -> None:
    """docs/configuration.md tells of every field; scripts/generate_config_docs writes it."""
    script: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "generate_config_docs"))
    assert (ROOT / "docs" / "configuration.md").read_text() == script["page"](), "run scripts/generate_config_docs"
