"""Two files of figures, side by side: what changed, and what got worse.

    scripts/bench compare OLD NEW

The files are those of `scripts/bench all`, or one bench's JSON each. Whether more is better follows from a figure's
name; where it does not, the figure is shown if it changed, and not judged.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

MORE_IS_BETTER = {"ratio", "speedup", "tokens", "share", "rate", "percent"}
LESS_IS_BETTER = {"seconds", "bytes", "loss", "lost", "diff", "error", "nmse", "cost", "duplicates", "missing"}
WORSE = "worse"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare figures with earlier ones; exit code 1 if one got worse."""

    files: Annotated[tuple[Path, Path], tyro.conf.Positional]
    """The earlier figures, and the later ones."""
    tolerance: float = 0.1
    """Relative changes up to this are noise."""
    json: bool = False
    """Print one JSON object as the last line of stdout, instead of a table."""

    def __post_init__(self) -> None:
        if self.tolerance < 0:
            raise ValueError(f"--tolerance must not be negative, not {self.tolerance}")


def run(options: Options) -> dict[str, Any]:
    """What changed by more than noise, by name: before, after, and the verdict (better, worse, changed)."""
    before, after = ({name: value for name, value in _flatten(_read(path))} for path in options.files)
    changes = {}
    for name in sorted(before.keys() & after.keys()):
        old, new = before[name], after[name]
        if abs(new - old) > options.tolerance * max(abs(old), abs(new)):
            changes[name] = {"before": old, "after": new, "verdict": verdict(name, old, new)}
    return {
        "changes": changes,
        WORSE: [name for name, change in changes.items() if change["verdict"] == WORSE],
        "gone": sorted(before.keys() - after.keys()),
        "new": sorted(after.keys() - before.keys()),
    }


def exit_code(figures: Mapping[str, Any]) -> int:
    """1 if a figure got worse."""
    return int(bool(figures[WORSE]))


def verdict(name: str, old: float, new: float) -> str:
    """Whether a figure of that name got better or worse; `changed` if the name does not tell."""
    words = set(name.replace(".", "_").split("_"))
    if words & LESS_IS_BETTER and ("ratio" not in words or "error" in words):
        old, new = new, old
    elif not words & MORE_IS_BETTER:
        return "changed"
    return "better" if new > old else WORSE


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path} holds no JSON: name what scripts/bench printed with --json, or wrote") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no figures: name what scripts/bench printed with --json, or wrote")
    return found


def _flatten(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers by name; entries of lists by their `name`, or their place."""
    for name, value in figures.items():
        if isinstance(value, list):
            entries = {str(e.get("name", n)) if isinstance(e, dict) else str(n): e for n, e in enumerate(value)}
            yield from _flatten(entries, f"{prefix}{name}.")
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)
