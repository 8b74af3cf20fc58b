"""The file that `scripts/bench all` writes and `scripts/bench compare` reads: each bench's figures, and their origin.

JSON: {"benches": {NAME: {"version", "measured_at", "machine", "torch", and "figures" or "error"}}}.
"""

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import swarm
from scripts.benches.shared.common import write_json

ROOT = Path(__file__).parents[3]

Entries = dict[str, dict[str, Any]]
"""The entries by the bench's name."""


def read(path: Path) -> Entries:
    """Read all entries of a file.

    Raises:
        ValueError: the file has another form, or cannot be read.
    """
    refusal = f"{path} is no file of figures that `scripts/bench all` wrote"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{refusal}: it holds no JSON") from None
    entries = found.get("benches") if isinstance(found, dict) else None
    if not isinstance(entries, dict):
        raise ValueError(f'{refusal}: it has no "benches"')
    for name, entry in entries.items():
        if not (isinstance(entry, dict) and "version" in entry and ("error" in entry or "figures" in entry)):
            raise ValueError(f'{refusal}: {name} has no "version", or neither "figures" nor "error"')
    return entries


def write(path: Path, entries: Entries) -> None:
    """Write a file whole or not at all."""
    write_json(path, {"benches": entries})


def origin() -> dict[str, Any]:
    """The origin of figures that are measured now: the versions of the code and of torch, and the machine."""
    return {
        "version": version(),
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
    }


def version() -> str:
    """The commit of this source tree, with "-dirty" if files differ from it; without git, the package's version."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return swarm.__version__
