"""Do paths through variants of stages pay (DiPaCo, arXiv 2403.10616)? Held-out losses of 16 paths and of dense models.

Text of four kinds (shared/texts) is cut into 16 shards by `swarm-model route`, and 16 peers train the paths of stages
with 1, 4, 4 and 1 variants by DiLoCo (sides/dipaco_arm). What makes the comparison honest:

- All arms have the same text, optimizer and rates. Those of peers have 16 peers and the same rounds, in which each peer
  takes as many inner steps as a path does, so that they read as many tokens.
- Whole texts are held out, and the router has not seen them. It chooses the path of each by its first 32 tokens, as it
  does for swarm-generate. These tokens count in no arm, because whoever has chosen by them knows them.
- `random` has as many parameters as `routed`, but its text was cut at random. What it is worse by is what routing
  gives, and what it is better by than `dense` is what the parameters give.
- `dense` has the size of one path, and `total` has all layers of all variants one after another, in every token's way.
- `single` is a dense model of one path's size in one process that takes as many steps as a path does. It is the paper's
  baseline: what the owner of one machine has without the others.
"""

import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.commands import command_line
from peers.local.supervisor import Supervisor, last_line
from scripts.benches.shared import texts
from scripts.benches.shared.common import (
    OutputOptions,
    ended,
    require_known,
    require_multiple,
    run_of,
    say,
    side,
    workplace,
    write_config,
)
from swarm.config import DataConfig, RunConfig
from swarm.data import path_router
from swarm.data.path_router import path_names
from swarm.data.sources import Source
from swarm.model.stages import build_stage

VARIANTS = (1, 4, 4, 1)
NUM_PATHS = 16
LENGTH, BATCH, ROUND_STEPS = 64, 16, 8
"""Tokens of a sample, samples of an inner step, and inner steps of a peer in a round."""
WINDOW = 8192
"""The most characters of a sequence, which takes one path."""
OPTIMIZER = {"name": "muon", "learning_rate": 2e-2}
OUTER = {"learning_rate": 1.0, "momentum": 0.0}
"""With few steps models learn much more by Muon than by AdamW, and by plain averages than by the usual outer step."""
TEXT, HELD_OUT = "text.jsonl", "held-out.json"
GOAL = 0.03
"""By how much the loss of paths is to be below that of a dense model of one path's size that takes a path's steps."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What differs between the arms: whether stages have variants, how the text is cut, how many layers a path has, how
    many peers there are (0: one process takes all steps), and how many paths' steps all of them take together."""

    variants: bool = False
    is_random: bool = False
    layers: int = len(VARIANTS)
    num_peers: int = NUM_PATHS
    num_paths: int = NUM_PATHS


ARMS: Mapping[str, Arm] = {
    "total": Arm(layers=sum(VARIANTS)), "routed": Arm(variants=True), "random": Arm(variants=True, is_random=True),
    "dense": Arm(), "single": Arm(num_peers=0, num_paths=1),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """Compare paths through variants of stages with dense models."""

    seeds: int = 3
    """Seeds of data, router and initial weights: 0, 1, ..."""
    arms: tuple[str, ...] = ("total", "routed", "random", "dense", "single")
    """Arms to train: paths with learned or random shards, a dense model of one path's size or of the total size; and
    one process that trains a dense model for as many steps as a path takes. Figures that need other arms are left
    out."""
    rounds: int = 16
    """Rounds of 8 inner steps of each of 16 peers."""
    d_model: int = 32
    """Width of the model; a multiple of 32."""
    characters: int = 800_000
    """Characters of each kind of text, if so many are found."""
    jobs: int = 2
    """Processes at once, of one thread each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known(self, "arms", ARMS)
        require_multiple("d-model", self.d_model, 32)


def run(options: Options) -> dict[str, Any]:
    with workplace("dipaco") as (folder, children):
        write_texts(folder, options.characters)
        _route(folder, children, options)
        commands = {
            f"{name}-{seed}": _command(folder, name, seed, options)
            for name in ARMS if name in options.arms for seed in range(options.seeds)
        }  # fmt: skip
        found: dict[str, dict[str, Any]] = {}
        for child in ended(children, commands, options.jobs):
            figures = found[child.name] = json.loads(last_line(child.log))
            say(f"{child.name}: {figures['loss']:.4f} after {figures['seconds']:.0f} s")
    by_arm = {name: [found[f"{name}-{seed}"] for seed in range(options.seeds)] for name in options.arms}
    configs = {name: run_config(ARMS[name], [], 0, options) for name in options.arms}
    return summary(by_arm) | {
        "parameters": {name: parameters(arm, options) for name, arm in ARMS.items() if name in options.arms},
        "tokens": {name: options.rounds * config.rounds.round_samples * LENGTH for name, config in configs.items()},
        "inner_steps_of_a_peer": options.rounds * ROUND_STEPS,
    }  # fmt: skip


def run_config(arm: Arm, shards: Sequence[str], seed: int, options: Options) -> RunConfig:
    """The run that an arm trains: each path on a shard of its own, or one model on all of them."""
    own_texts: dict[str, Any] = {"paths": shards} if arm.variants else {"dataset": shards or "stdlib"}
    samples = arm.num_paths * ROUND_STEPS * BATCH
    return run_of(
        "dipaco", width=options.d_model, layers=arm.layers, head_width=32, stages=len(VARIANTS),
        variants=VARIANTS if arm.variants else (), setting="diloco", length=LENGTH, microbatch=BATCH,
        round_samples=samples, rounds={"inner_batch_samples": BATCH},
        data={"seed": seed, "held_out_fraction": 1e-6} | own_texts, averaging={"overlap_steps": 0}, outer=OUTER,
        optimizer={
            **OPTIMIZER, "schedule": "cosine", "warmup_samples": samples // 2,
            "total_samples": options.rounds * samples,
        },
    )  # fmt: skip


def parameters(arm: Arm, options: Options) -> dict[str, int]:
    """How many parameters each path has, and how many all have together."""
    config = run_config(arm, [], 0, options)
    of_stage = [
        sum(parameter.numel() for parameter in build_stage(config, stage, device="meta").parameters())
        for stage in range(config.stages.num_stages)
    ]
    return {"path": sum(of_stage), "all": sum(of_stage[block.stage] for block in config.blocks)}


def write_texts(folder: Path, num_characters: int) -> None:
    """Write the text to train on, and the held-out sequences with the kind of each."""
    training, held_out = texts.of_each_kind(num_characters)
    for kind in training:
        counted = [sum(map(len, some[kind])) for some in (training, held_out)]
        say(f"{kind}: {counted[0]:,} characters to train on, and {counted[1]:,} held out")
    _write(folder / TEXT, itertools.chain.from_iterable(training.values()))
    sequences: list[tuple[str, str]] = []
    for kind, some in held_out.items():
        path = folder / f"{kind}.jsonl"
        _write(path, some)
        source = Source(str(path), DataConfig(dataset=str(path)))
        sequences += [(kind, sequence) for sequence in path_router.sequences(source, WINDOW)]
    (folder / HELD_OUT).write_text(json.dumps(sequences), encoding="utf-8")


def _write(path: Path, rows: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": row}) + "\n" for row in rows)


def _route(folder: Path, children: Supervisor, options: Options) -> None:
    """Cut the text into shards for each seed, by a router and, if an arm needs them, at random."""
    kinds = {"shards": [], "random": ["--random"]} if "random" in options.arms else {"shards": []}
    # The variants of its stages say which paths have blocks in common.
    config = folder / "route.toml"
    write_config(run_config(ARMS["routed"], path_names(NUM_PATHS, ".jsonl"), 0, options), config)
    commands = {
        f"{kind}-{seed}": command_line(
            "model",
            [
                "route", "--output", str(folder / f"{kind}-{seed}"), "--dataset", str(folder / TEXT), "--config",
                str(config), "--window", str(WINDOW), "--seed", str(seed), *more,
            ],
        )
        for kind, more in kinds.items() for seed in range(options.seeds)
    }  # fmt: skip
    for child in ended(children, commands, options.jobs):
        say(f"{child.name}: the text is cut")


def _command(folder: Path, name: str, seed: int, options: Options) -> list[str]:
    arm, shards = ARMS[name], folder / f"{'random' if ARMS[name].is_random else 'shards'}-{seed}"
    names = [str(shards / file) for file in path_names(NUM_PATHS, ".jsonl")]
    write_config(run_config(arm, names, seed, options), folder / f"{name}-{seed}.toml")
    router = shards if arm.variants and not arm.is_random else ""
    return side("dipaco_arm", folder / f"{name}-{seed}.toml", folder / HELD_OUT, router, arm.num_peers, options.rounds)


def summary(by_arm: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The figures of all arms over their seeds, which are compared seed by seed."""
    arms = {
        name: {
            "loss": statistics.mean(run["loss"] for run in runs), "losses": [run["loss"] for run in runs],
            "by_kind": {kind: statistics.mean(run["by_kind"][kind] for run in runs) for kind in runs[0]["by_kind"]},
            "bytes_averaged_per_peer": runs[0]["bytes_per_peer"], "curves": [run["curve"] for run in runs],
            "seconds": statistics.mean(run["seconds"] for run in runs),
        }
        for name, runs in by_arm.items()
    }  # fmt: skip

    def better(one: str, other: str) -> list[float] | None:
        if not {one, other} <= arms.keys():
            return None
        return [1.0 - ours / theirs for ours, theirs in zip(arms[one]["losses"], arms[other]["losses"], strict=True)]

    found: dict[str, Any] = {"arms": arms, "passed": None}
    for other in arms.keys() - {"routed"}:
        if (shares := better("routed", other)) is not None:
            found[f"better_than_{other}"] = statistics.mean(shares)
            found[f"better_than_{other}_by_seed"] = shares
    if {"routed", "random"} <= arms.keys():
        rerouted = statistics.mean(run["rerouted_loss"] for run in by_arm["routed"])
        found["routing"] = {"learned": arms["routed"]["loss"], "random": arms["random"]["loss"], "rerouted": rerouted}
    if "better_than_single" in found:
        found["passed"] = found["better_than_single"] >= GOAL
    return found
