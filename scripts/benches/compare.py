"""Compares two files of figures: what changed, and what got worse.

    scripts/bench compare OLD NEW

The files are those of `scripts/bench all` (with --only NAME for a single bench). Only the figures that a bench declares
in its JUDGED (shared/judged.py) are judged. Other figures are shown if they changed. A bench that fails, and a judged
figure that is missing or no longer finite, count as worse.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import tyro

from scripts.benches.catalogue import MEASURING, module_of
from scripts.benches.shared import figures_file
from scripts.benches.shared.common import OutputOptions
from scripts.benches.shared.judged import Judgement

NAMING = ("name", "megabits", "round_trip_ms")
"""Fields that name an entry of a list."""
WORSE = "worse"


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """Compare figures with earlier ones; exit code 1 if one got worse."""

    files: Annotated[tuple[Path, Path], tyro.conf.Positional]
    """The earlier figures, and the later ones."""
    tolerance: float = 0.05
    """Changes up to this are noise: relative to the larger value, or absolute if the figure is a difference."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"--tolerance must be at least 0 and below 1, not {self.tolerance}")
        for path in self.files:
            figures_file.read(path)


def run(options: Options) -> dict[str, Any]:
    """What changed by more than noise, by name: before, after, and the verdict (better, worse, changed)."""
    before, after = (figures_file.read(path) for path in options.files)
    changes: dict[str, dict[str, Any]] = {}
    gone, new = list(before.keys() - after.keys()), list(after.keys() - before.keys())
    for bench in before.keys() & after.keys():
        outcomes = [entries[bench] for entries in (before, after)]
        if any("error" in outcome for outcome in outcomes):
            changes |= _compare_errors(bench, *outcomes)
            continue
        old, current = (dict(_flatten(outcome["figures"], f"{bench}.")) for outcome in outcomes)
        judged = _judged(bench, old.keys() | current.keys())
        gone += old.keys() - current.keys() - judged.keys()
        new += current.keys() - old.keys()
        for name in old.keys() & (current.keys() | judged.keys()):
            found = verdict(judged.get(name), old[name], current.get(name, math.nan), options.tolerance)
            if found is not None:
                changes[name] = {"before": old[name], "after": current.get(name), "verdict": found}
    return {
        "changes": {name: changes[name] for name in sorted(changes)},
        WORSE: sorted(name for name, change in changes.items() if change["verdict"] == WORSE),
        "gone": sorted(gone),
        "new": sorted(new),
    }


def exit_code(figures: Mapping[str, Any]) -> int:
    """1 if a figure got worse."""
    return int(bool(figures[WORSE]))


def verdict(judgement: Judgement | None, old: float, new: float, tolerance: float) -> str | None:
    """Whether a figure got better or worse, or `changed` if it is not judged; None if the change is noise."""
    were_finite, are_finite = math.isfinite(old), math.isfinite(new)
    scale = 1.0 if judgement is not None and judgement.is_difference else max(abs(old), abs(new))
    if were_finite == are_finite and not (are_finite and abs(new - old) > tolerance * scale):
        return None
    if judgement is None:
        return "changed"
    is_better = (new > old) == judgement.more_is_better if were_finite == are_finite else are_finite
    return "better" if is_better else WORSE


def _compare_errors(bench: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The change of a bench that has failed at least once."""
    old, new = (outcome.get("error", "figures") for outcome in (before, after))
    if "error" in before and "error" in after:
        return {}
    return {bench: {"before": old, "after": new, "verdict": WORSE if "error" in after else "better"}}


def _judged(bench: str, names: Iterable[str]) -> dict[str, Judgement]:
    """The figures of a bench that are judged, and how."""
    patterns: Mapping[str, Judgement] = module_of(bench).JUDGED if bench in MEASURING else {}
    return {
        name: judgement
        for name in names
        for pattern, judgement in patterns.items()
        if fnmatchcase(name, f"{bench}.{pattern}")
    }


def _flatten(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers and flags by their dotted names; entries of lists by their names. Lists of numbers are left out."""
    for name, value in figures.items():
        if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            yield from _flatten({_name_of(one, number): one for number, one in enumerate(value)}, f"{prefix}{name}.")
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield prefix + name, float(value)


def _name_of(entry: Mapping[str, Any], number: int) -> str:
    """The name of a list's entry; its place if it has none."""
    return " ".join(f"{entry[field]}" for field in NAMING if field in entry) or str(number)
