"""Does a swarm learn as it should? Held-out loss at equal tokens and at equal seconds, against plain training.

`plain` is one process that does the same as the swarm: synchronous steps, or DiLoCo with as many workers as a stage has
peers. `single` is one process that takes a step on every 16 samples. All losses are measured after training, from kept
checkpoints. `seconds_to_loss` is the time until a side reaches the loss that `plain` has after four fifths of its
tokens, over the time that `plain` needs for it.
"""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from peers.commands import command_line
from peers.local.supervisor import last_line
from scripts.benches.shared.common import (
    BenchOptions,
    ended,
    require_distinct,
    require_multiple,
    run_of,
    say,
    side,
    with_corpus,
    workplace,
    write_config,
)
from scripts.benches.shared.swarm import SwarmProcesses
from scripts.benches.sides.reference import HeldOut
from swarm.checkpoint.folder import CheckpointFolder
from swarm.config import RoundsConfig, RunConfig, Setting, StagesConfig
from swarm.errors import DeadlineExceeded
from swarm.types import Block

SETTINGS: tuple[Setting, ...] = ("synchronous", "diloco")
PEERS_A_STAGE = 2
ROUND_SAMPLES, BATCH_SAMPLES, MICROBATCH_SAMPLES = 512, 16, 8
"""Samples of a DiLoCo round, of a synchronous round or an inner step, and of a microbatch."""
POINTS = 20  # Points of a curve
SHARE_OF_TOKENS = 0.8  # The loss that every side has to reach is that of plain training after this share of its tokens


Point = tuple[int, float, float]  # Tokens, seconds, loss


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare how a swarm learns with plain training."""

    settings: tuple[Setting, ...] = SETTINGS
    """Settings in which to train a model in two stages."""
    seeds: int = 3
    """Seeds of data and initial weights: 0, 1, ..."""
    tokens: int = 1 << 20
    """The least number of tokens to train on."""
    d_model: int = 128
    """Width of the model; a multiple of 32."""
    num_layers: int = 4
    """Layers of the model."""
    round_trips_ms: tuple[int, ...] = (0,)
    """Milliseconds that are added to a call and its answer between any two processes of the swarm."""
    optimizer: Literal["auto", "adamw", "muon"] = "auto"
    """The optimizer of all sides."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_multiple("d-model", self.d_model, 32)
        require_distinct(self, ("settings", "round_trips_ms"))


def run(options: Options) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in options.settings:
        runs = [_train(options, setting, seed) for seed in range(options.seeds)]
        plain = [curves["plain"] for curves in runs]
        found[setting] = {name: summary([curves[name] for curves in runs], plain) for name in runs[0]}
    return found | {"tokens": options.tokens, "d_model": options.d_model}


def run_config(options: Options, setting: Setting, seed: int) -> RunConfig:
    return run_of(
        "learning", width=options.d_model, layers=options.num_layers, head_width=32, stages=2, setting=setting,
        length=64, microbatch=MICROBATCH_SAMPLES, dataset=options.dataset, data={"seed": seed},
        round_samples=BATCH_SAMPLES if setting == "synchronous" else ROUND_SAMPLES,
        rounds={"inner_batch_samples": BATCH_SAMPLES}, optimizer={"name": options.optimizer},
    )  # fmt: skip


def single_config(config: RunConfig) -> RunConfig:
    """The configuration of the side `single`: one process that takes a step on every 16 samples, with the same
    optimizer."""
    rounds = RoundsConfig(setting="synchronous", round_samples=BATCH_SAMPLES)
    return dataclasses.replace(config, rounds=rounds, optimizer=config.gradient_step)


def num_rounds(config: RunConfig, tokens: int) -> int:
    return -(-tokens // (config.rounds.round_samples * config.data.sequence_length))


def _train(options: Options, setting: Setting, seed: int) -> dict[str, list[Point]]:
    config, data = with_corpus(run_config(options, setting, seed))
    curves = {"plain": _plain(config, options.tokens)}
    if not config.rounds.synchronous:
        curves["single"] = _plain(single_config(config), options.tokens)
    for round_trip_ms in options.round_trips_ms:
        name = "swarm" if not round_trip_ms else f"swarm_{round_trip_ms}_ms"
        curves[name] = _swarm(config, HeldOut(config, data), options.tokens, round_trip_ms)
    for name, curve in curves.items():
        say(f"{setting}, seed {seed}, {name}: {curve[-1][2]:.4f} after {curve[-1][1]:.0f} s")
    return curves


def _plain(config: RunConfig, tokens: int) -> list[Point]:
    with workplace("learning") as (folder, children):
        write_config(config, folder / "run.toml")
        command = side("plain_training", folder / "run.toml", PEERS_A_STAGE, num_rounds(config, tokens), POINTS)
        (child,) = ended(children, {"plain training": command}, 1)
        return [(int(tokens), seconds, loss) for tokens, seconds, loss in json.loads(last_line(child.log))]


def _swarm(config: RunConfig, held_out: HeldOut, tokens: int, round_trip_ms: int) -> list[Point]:
    rounds = num_rounds(config, tokens)
    every = max(1, rounds // POINTS)

    with workplace("learning", line_seconds=round_trip_ms / 1e3 if round_trip_ms else None) as (folder, children):
        kept = folder / "checkpoints"

        def command(name: str, arguments: Sequence[str]) -> list[str]:
            keeping = ["--checkpoint", kept, "--checkpoint-every", every, "--keep-checkpoints", rounds + 1]
            return command_line(name, [*arguments, *(map(str, keeping) if name == "peer" else [])])

        swarm = SwarmProcesses(config, children, folder / "swarm", program=command)
        swarm.start_peers([*range(config.stages.num_stages)] * PEERS_A_STAGE)
        rows = swarm.train("trainer", rounds)
        swarm.stop()
        whole = CheckpointFolder(kept, dataclasses.replace(config, stages=StagesConfig(num_stages=1)))
        seconds_after: dict[int, float] = {}
        for row in rows:
            seconds_after[row["step"]] = max(seconds_after.values(), default=0.0) + row["train/step_time"]
        curve = []
        for number in range(every, rounds + 1, every):
            restored = whole.restore(Block(0), held_out.shapes, round_number=number)
            if restored is None:
                raise DeadlineExceeded(f"no checkpoint of round {number} was kept")
            weights = {
                name.removeprefix("anchor/"): t for name, t in restored.tensors.items() if name.startswith("anchor/")
            }
            tokens_then = restored.run_samples * config.data.sequence_length
            curve.append((tokens_then, seconds_after[number], held_out.loss(weights)))
    return curve


def seconds_until(curve: Sequence[Point], loss: float) -> float | None:
    """Seconds until a curve reaches a loss, interpolated linearly between two points; None if it never reaches it."""
    before: Point | None = None
    for point in curve:
        if point[2] <= loss:
            if before is None:
                return point[1]
            return before[1] + (point[1] - before[1]) * (before[2] - loss) / (before[2] - point[2])
        before = point
    return None


def target_loss(plain: Sequence[Point]) -> float:
    return next(loss for tokens, _, loss in plain if tokens >= SHARE_OF_TOKENS * plain[-1][0])


def summary(curves: Sequence[Sequence[Point]], plain: Sequence[Sequence[Point]]) -> dict[str, Any]:
    """One side's figures over its seeds, and ratios to plain training with the same seed."""
    losses = [curve[-1][2] for curve in curves]
    ratios = []
    for curve, other in zip(curves, plain, strict=True):
        target = target_loss(other)
        seconds, usual = seconds_until(curve, target), seconds_until(other, target)
        assert usual is not None
        ratios.append(None if seconds is None else seconds / usual)
    reached = [ratio for ratio in ratios if ratio is not None]
    return {
        "final_loss": statistics.mean(losses), "final_losses": losses,
        "seconds": statistics.mean(curve[-1][1] for curve in curves),
        "seconds_to_loss": statistics.mean(reached) if len(reached) == len(ratios) else None,
        "seconds_to_loss_by_seed": ratios, "curves": list(curves),
    }  # fmt: skip
