"""What do rarer and smaller averages cost? Validation loss and bytes of each way to average, at equal tokens.

A process trains each arm (sides/diloco_arm.py) with each seed. All peers of an arm are in one process.
"""

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.local.supervisor import Supervisor, last_line
from scripts.benches.shared.common import (
    BenchOptions,
    ended,
    require_known,
    say,
    side,
    with_corpus,
    workplace,
    write_json,
)
from scripts.benches.sides.diloco_arm import ARMS, run_config

COMPARISONS = {
    "synchronous_vs_single": ("synchronous", "single", 0.001), "h50_vs_synchronous": ("h50", "synchronous", 0.02),
    "int8_h50_vs_synchronous": ("int8", "synchronous", 0.01), "churn_cost": ("churn", "four", 0.01),
    "overlap_cost": ("overlap", "h50", 0.01), "sparse_vs_int8": ("sparse-h10", "int8-h10", 0.01),
}  # fmt: skip
"""Differences in loss, by name: an arm, the arm from which it differs, and the bound below which the goal is
reached."""
H_CURVE = ("h10", "h50", "h200")
REPORTED_RISE = 0.1188
"""The rise of the perplexity from H = 10 to H = 200 that the diloco-swarm project (2025) reports: 27.95 to 31.27."""
FEWER_BYTES = 30.0  # SparseLoCo's goal


Figures = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare ways to average."""

    seeds: int = 3
    """Seeds of data and initial weights: 0, 1, ..."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Arms to train. Goals that need other arms are left out."""
    rounds_at_200: int = 20
    """Outer steps of the arm with H = 200. They determine the number of tokens for all arms."""
    jobs: int = 2
    """Processes at once, of one thread each."""
    keep: Path | None = None
    """Keep the figures of each arm and seed in this folder, and do not train again what is already there. All must have
    the same rounds and text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known(self, "arms", ARMS)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The files in a folder, and the origin that they must have."""

    folder: Path
    rounds_at_200: int  # Outer steps of the arm with H = 200
    dataset: str  # The dataset as named on the command line
    digest: str  # The digest of the dataset's text

    def read(self, arm: str, seed: int) -> Mapping[str, Any] | None:
        """The figures of an arm and seed; None if they are not kept. Raises ValueError."""
        path = self._path(arm, seed)
        if not path.exists():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        figures: Mapping[str, Any] = found["figures"]
        rounds, dataset, digest = (found["of"][name] for name in ("rounds_at_200", "dataset", "digest"))
        if (rounds, digest) != (self.rounds_at_200, self.digest):
            raise ValueError(
                f"--keep: {path} is of {rounds} rounds at H = 200 of {dataset} ({digest[:12]}), and not of "
                f"{self.rounds_at_200} of {self.dataset} ({self.digest[:12]}); name another folder"
            )
        return figures

    def write(self, arm: str, seed: int, figures: Mapping[str, Any]) -> None:
        of = {"rounds_at_200": self.rounds_at_200, "dataset": self.dataset, "digest": self.digest}
        write_json(self._path(arm, seed), {"of": of, "figures": dict(figures)})

    def _path(self, arm: str, seed: int) -> Path:
        return self.folder / f"{arm}-{seed}.json"


def run(options: Options) -> dict[str, Any]:
    # Errors of an arm or of the text are reported before any process starts.
    for name in options.arms:
        config = run_config(ARMS[name], seed=0, rounds_at_200=options.rounds_at_200, dataset=options.dataset)
        digest = with_corpus(config)[0].data.digest
    kept = None
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        kept = Kept(folder=options.keep, rounds_at_200=options.rounds_at_200, dataset=options.dataset, digest=digest)
    with workplace("diloco") as (_, children):
        runs = _train_all(options, children, kept)
    by_arm = {name: [runs[name, seed] for seed in range(options.seeds)] for name in options.arms}
    return {"arms": {name: summary(of_arm) for name, of_arm in by_arm.items()}, "goals": goals(by_arm)}


def _train_all(options: Options, children: Supervisor, kept: Kept | None) -> dict[tuple[str, int], Figures]:
    """The figures of each arm and seed: those that are kept, and the others from `jobs` processes at a time."""
    wanted = list(itertools.product(options.arms, range(options.seeds)))
    found = {run: kept.read(*run) for run in wanted} if kept is not None else {}
    runs: dict[tuple[str, int], Figures] = {run: figures for run, figures in found.items() if figures is not None}
    named = {f"{arm}-{seed}": (arm, seed) for arm, seed in wanted if (arm, seed) not in runs}
    for child in ended(children, {name: _command(*run, options) for name, run in named.items()}, options.jobs):
        arm, seed = named[child.name]
        figures = runs[arm, seed] = json.loads(last_line(child.log))
        if kept is not None:
            kept.write(arm, seed, figures)
        say(f"{arm}, seed {seed}: {figures['val_loss']:.4f} after {figures['seconds']:.0f} s")
    return runs


def _command(arm: str, seed: int, options: Options) -> list[str]:
    return side("diloco_arm", arm, seed, options.rounds_at_200, options.dataset)


def summary(runs: Sequence[Figures]) -> dict[str, Any]:
    """One arm's figures over its seeds: mean and spread of the loss, the mean curve, and the means of all counts."""
    curves = zip(*(figures["curve"] for figures in runs), strict=True)
    counted = runs[0].keys() - {"curve"}
    return {
        "val_loss_std": _spread([figures["val_loss"] for figures in runs]),
        "curve": [[points[0][0], statistics.mean(loss for _, loss in points)] for points in curves],
        **{name: statistics.mean(figures[name] for figures in runs) for name in sorted(counted)},
    }


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def goals(by_arm: Mapping[str, Sequence[Figures]]) -> dict[str, Any]:
    losses = {name: [figures["val_loss"] for figures in runs] for name, runs in by_arm.items()}
    found: dict[str, Any] = {"spread": {}, "reached": {}}
    for name, (ours, theirs, bound) in COMPARISONS.items():
        if {ours, theirs} <= by_arm.keys():
            relative = [our / their - 1.0 for our, their in zip(losses[ours], losses[theirs], strict=True)]
            found[name], found["spread"][name] = statistics.mean(relative), _spread(relative)
            found["reached"][name] = found[name] < bound
    if set(H_CURVE) <= by_arm.keys():
        found["h_curve"] = {name: statistics.mean(losses[name]) for name in H_CURVE}
        rises = [math.exp(loss - found["h_curve"]["h10"]) - 1.0 for loss in found["h_curve"].values()]
        found["h_curve"] |= {"h50_perplexity_rise": rises[1], "h200_perplexity_rise": rises[2]}
        found["reached"]["h_curve"] = 0.0 < rises[1] < rises[2] <= REPORTED_RISE
    if {"sparse-h10", "int8-h10"} <= by_arm.keys():
        sparse, int8 = ([figures["bytes_per_peer"] for figures in by_arm[name]] for name in ("sparse-h10", "int8-h10"))
        found["sparse_bytes_ratio"] = sum(int8) / sum(sparse)
        found["reached"]["sparse_bytes_ratio"] = found["sparse_bytes_ratio"] >= FEWER_BYTES
    return found
