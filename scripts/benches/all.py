"""Runs every bench, one after another, and writes their figures into a file that `scripts/bench compare` reads.

    scripts/bench all --json --out FILE

Each bench is a process of its own, with its default options. The file is written after each bench. Figures that the
file already has are kept, together with the version of the code that they were measured with. So a run that was stopped
continues where it was. A bench that failed is tried again.
"""

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peers.shared import cli
from scripts.benches.catalogue import MEASURING, module_of
from scripts.benches.shared import figures_file
from scripts.benches.shared.common import BenchOptions, say


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Run all benches; takes hours."""

    out: Path
    """File for the figures, JSON."""
    only: tuple[str, ...] = ()
    """Run these alone."""

    def __post_init__(self) -> None:
        cli.require_known(self, "only", MEASURING, at_least=0)
        if not self.out.parent.is_dir():
            raise ValueError(f"--out {self.out}: there is no folder {self.out.parent}")
        if self.out.exists():
            figures_file.read(self.out)


def run(options: Options) -> dict[str, Any]:
    """Run the benches that the file lacks, and return all that the file then holds."""
    entries = figures_file.read(options.out) if options.out.exists() else {}
    # A file that cannot be written is noticed before any bench runs.
    figures_file.write(options.out, entries)
    for name in _wanted(options):
        if "figures" in entries.get(name, {}):
            say(f"{name} is kept, {_origin(entries[name])}")
            continue
        # The version is asked first, because the tree may change while a bench runs.
        entries[name] = {**figures_file.origin(), **_measure(name, options.dataset)}
        figures_file.write(options.out, entries)
    return {"benches": entries}


def exit_code(figures: Mapping[str, Any]) -> int:
    """1 if a bench in the file ended with an error, else 0. `compare` says whether a bench got worse."""
    return int(any("error" in entry for entry in figures["benches"].values()))


def _wanted(options: Options) -> Sequence[str]:
    """The benches to run. A bench is left out if it needs a text of its own that was not named, or a GPU that is not
    there."""
    wanted = []
    for name in options.only or tuple(MEASURING):
        if options.dataset == BenchOptions.dataset and _dataset_is_required(name):
            say(f"{name} is left out: its figures mean something for its own text only, which --dataset is to name")
        elif name == "gpu" and not torch.cuda.is_available():
            say(f"{name} is left out: there is no GPU that torch can use")
        else:
            wanted.append(name)
    return wanted


def _origin(entry: dict[str, Any]) -> str:
    current = figures_file.version()
    if entry["version"] == current:
        return f"of this version ({current})"
    return f"OF ANOTHER VERSION ({entry['version']}; this is {current})"


def _measure(name: str, dataset: str) -> dict[str, Any]:
    """Run a bench, and return its figures, or the reason why it has none."""
    say(f"{name} begins")
    started_at = time.monotonic()
    command = [sys.executable, "-m", "scripts.benches", *arguments_of(name, dataset)]
    bench = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    say(f"{name} ended after {time.monotonic() - started_at:.0f} s")
    lines = bench.stdout.splitlines()
    # A bench that misses its goal prints figures and ends with an error code.
    if bench.returncode and not (lines and lines[-1].startswith("{")):
        return {"error": f"exit code {bench.returncode}"}
    return {"figures": json.loads(lines[-1])}


def arguments_of(name: str, dataset: str) -> list[str]:
    """The command line of a bench, with the dataset if it takes one."""
    return [name, "--json", *(["--dataset", dataset] if "dataset" in _fields(name) else [])]


def _dataset_is_required(name: str) -> bool:
    return "dataset" in _fields(name) and _fields(name)["dataset"].default is dataclasses.MISSING


def _fields(name: str) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(module_of(name).Options)}
