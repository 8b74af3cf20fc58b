"""Every bench after the other, into one file that `scripts/bench compare` reads.

    scripts/bench all --json --out FILE

Each is a process of its own, with its usual options. The file is written after each of them, and what it holds already
is not measured again: so a run that was stopped goes on.
"""

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import swarm
from scripts.benches.catalogue import MEASURING
from scripts.benches.common import BenchOptions, say


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Run all benches; takes hours."""

    out: Path
    """File for the figures, JSON."""
    only: tuple[str, ...] = ()
    """Run these alone."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.only if name not in MEASURING]:
            raise ValueError(f"--only: {unknown[0]!r} is none of {', '.join(MEASURING)}")


def run(options: Options) -> dict[str, Any]:
    """Run what the file lacks; gives all that it then holds."""
    found: dict[str, Any] = {"benches": {}}
    if options.out.exists():
        found = json.loads(options.out.read_text(encoding="utf-8"))
    found["swarm"], found["torch"] = swarm.__version__, torch.__version__
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    for name in options.only or MEASURING:
        if name not in found["benches"]:
            found["benches"][name] = _measure(name, options.dataset)
            options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def _measure(name: str, dataset: str) -> dict[str, Any]:
    """A bench's figures, or why it has none."""
    say(f"{name} begins")
    started_at = time.monotonic()
    command = [sys.executable, "-m", "scripts.benches", *arguments_of(name, dataset)]
    bench = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    say(f"{name} ended after {time.monotonic() - started_at:.0f} s")
    lines = bench.stdout.splitlines()
    # One that misses its goal has figures, and an exit code as well.
    if bench.returncode and not (lines and lines[-1].startswith("{")):
        return {"error": f"exit code {bench.returncode}"}
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def arguments_of(name: str, dataset: str) -> list[str]:
    """The command line of a bench, with the dataset if it takes one."""
    module = import_module(f"scripts.benches.{name.replace('-', '_')}")
    takes_dataset = "dataset" in {field.name for field in dataclasses.fields(module.Options)}
    return [name, "--json", *(["--dataset", dataset] if takes_dataset else [])]
