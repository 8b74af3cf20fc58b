"""Does a swarm learn as it should? Held-out loss at equal tokens and at equal seconds, against plain training.

`plain` is one process that does the same as the swarm: synchronous steps, or DiLoCo with as many workers as a stage has
peers. `single` is one process that takes a step on every 16 samples. All losses are measured after training, from kept
checkpoints. `seconds_to_loss` is the time until a side reaches the loss that `plain` has after four fifths of its
tokens, over the time that `plain` needs for it.
"""

import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peers.commands import command_line
from peers.local.supervisor import Supervisor, last_line
from peers.shared import option_checks
from scripts.benches.shared.common import (
    POLL_SECONDS,
    BenchOptions,
    require_multiple,
    say,
    side,
    with_corpus,
    write_config,
)
from scripts.benches.shared.swarm import Lines, SwarmProcesses, serve
from scripts.benches.shared.throttle import Throttle
from scripts.benches.sides.reference import HeldOut
from swarm import config as configs
from swarm.checkpoint.folder import CheckpointFolder
from swarm.config import DataConfig, ModelConfig, OptimizerConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.errors import DeadlineExceeded, PeerUnavailable

Setting = Literal["synchronous", "diloco", "tiny"]
SETTINGS: tuple[Setting, ...] = ("synchronous", "diloco", "tiny")
PEERS_A_STAGE = 2
ROUND_SAMPLES, BATCH_SAMPLES, MICROBATCH_SAMPLES = 512, 16, 8
"""Samples of a DiLoCo round, of a synchronous one, and of a microbatch."""
POINTS = 20  # Points of a curve
SHARE_OF_TOKENS = 0.8  # The loss that every side has to reach is that of plain training after this share of its tokens


Point = tuple[int, float, float]  # Tokens, seconds, loss


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare how a swarm learns with plain training."""

    settings: tuple[Setting, ...] = SETTINGS
    """What to train: the model of --d-model in two stages, in either setting, or the preset tiny."""
    seeds: int = 3
    """Seeds of data and initial weights: 0, 1, ..."""
    tokens: int = 1 << 20
    """The least number of tokens to train on."""
    d_model: int = 128
    """Width of the model, except for tiny; a multiple of 32."""
    num_layers: int = 4
    """Layers of the model."""
    sequence_length: int = 64
    """Tokens of its samples."""
    round_trips_ms: tuple[int, ...] = (0,)
    """Milliseconds that are added to a call and its answer between any two processes of the swarm."""
    optimizer: Literal["auto", "adamw", "muon"] = "auto"
    """The optimizer of all sides."""
    inner_batch_samples: int = BATCH_SAMPLES
    """DiLoCo: samples of an inner step. With 8, each of the two peers of a stage takes as many steps as one process
    that takes a step on every 16 samples."""
    max_staleness: int = -1
    """DiLoCo: rounds.max_staleness; -1 keeps the default."""

    def __post_init__(self) -> None:
        option_checks.require_at_least(self, {"seeds": 1, "tokens": 1, "num_layers": 2, "sequence_length": 1})
        require_multiple("d-model", self.d_model, 32)
        require_multiple("inner-batch-samples", self.inner_batch_samples, MICROBATCH_SAMPLES)
        option_checks.require_distinct(self, ("settings", "round_trips_ms"))
        if min(self.round_trips_ms, default=-1) < 0:
            raise ValueError("--round-trips-ms needs numbers from 0 on")


def run(options: Options) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in options.settings:
        runs = [_train(options, setting, seed) for seed in range(options.seeds)]
        found[setting] = {
            name: summary([sides[name] for sides in runs], [s["plain"] for s in runs]) for name in runs[0]
        }
    return found | {"tokens": options.tokens, "d_model": options.d_model}


def run_config(options: Options, setting: Setting, seed: int) -> RunConfig:
    if setting == "tiny":
        config = configs.load_preset("tiny")
        data = dataclasses.replace(config.data, dataset=options.dataset, seed=seed)
        rounds = dataclasses.replace(config.rounds, inner_batch_samples=options.inner_batch_samples)
        optimizer = dataclasses.replace(config.optimizer, name=options.optimizer)
        return dataclasses.replace(config, data=data, rounds=rounds, optimizer=optimizer)
    samples = BATCH_SAMPLES if setting == "synchronous" else ROUND_SAMPLES
    rounds = RoundsConfig(setting=setting, round_samples=samples, inner_batch_samples=options.inner_batch_samples)
    if options.max_staleness >= 0:
        rounds = dataclasses.replace(rounds, max_staleness=options.max_staleness)
    return RunConfig(
        run="bench-learning",
        model=ModelConfig(
            num_layers=options.num_layers, d_model=options.d_model, num_heads=options.d_model // 32, vocab_size=256
        ),
        stages=StagesConfig(num_stages=2),
        data=DataConfig(
            dataset=options.dataset, seed=seed, sequence_length=options.sequence_length,
            microbatch_size=MICROBATCH_SAMPLES,
        ),
        rounds=rounds,
        optimizer=OptimizerConfig(name=options.optimizer),
    )  # fmt: skip


def single_config(config: RunConfig) -> RunConfig:
    """The configuration of the side `single`: one process that takes a step on every 16 samples, with the same
    optimizer."""
    rounds = RoundsConfig(setting="synchronous", round_samples=BATCH_SAMPLES)
    return dataclasses.replace(config, rounds=rounds, optimizer=config.gradient_step)


def num_rounds(config: RunConfig, tokens: int) -> int:
    return -(-tokens // (config.rounds.round_samples * config.data.sequence_length))


def _train(options: Options, setting: Setting, seed: int) -> dict[str, dict[str, Any]]:
    config, data = with_corpus(run_config(options, setting, seed))
    sides: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-learning-") as name:
        folder = Path(name)
        sides["plain"] = {"curve": _plain(config, options.tokens, folder / "plain")}
        if not config.rounds.synchronous:
            sides["single"] = {"curve": _plain(single_config(config), options.tokens, folder / "single")}
        for round_trip_ms in options.round_trips_ms:
            side = "swarm" if not round_trip_ms else f"swarm_{round_trip_ms}_ms"
            sides[side] = _swarm(config, HeldOut(config, data), options.tokens, folder / side, round_trip_ms)
    for side, figures in sides.items():
        _, seconds, loss = figures["curve"][-1]
        say(f"{setting}, seed {seed}, {side}: {loss:.4f} after {seconds:.0f} s")
    return sides


def _plain(config: RunConfig, tokens: int, folder: Path) -> list[Point]:
    folder.mkdir()
    write_config(config, folder / "run.toml")
    command = side("plain_training", folder / "run.toml", PEERS_A_STAGE, num_rounds(config, tokens), POINTS)
    with Supervisor(folder / "logs") as children:
        child = children.start(folder.name, command)
        while not (ended := children.exits()):
            time.sleep(POLL_SECONDS)
        if ended[0].returncode:
            raise PeerUnavailable(f"{folder.name} failed: {ended[0].reason}")
        return [(int(tokens), seconds, loss) for tokens, seconds, loss in json.loads(last_line(child.log))]


def _swarm(config: RunConfig, held_out: HeldOut, tokens: int, folder: Path, round_trip_ms: int) -> dict[str, Any]:
    rounds = num_rounds(config, tokens)
    every = max(1, rounds // POINTS)
    kept = folder / "checkpoints"

    def command(name: str, arguments: Sequence[str]) -> list[str]:
        keeping = ["--checkpoint", str(kept), "--checkpoint-every", str(every), "--keep-checkpoints", str(rounds + 1)]
        return command_line(name, [*arguments, *(keeping if name == "peer" else [])])

    with (
        Throttle(round_trip_seconds=round_trip_ms / 1e3) as throttle,
        Lines(folder / "logs", throttle) if round_trip_ms else Supervisor(folder / "logs") as children,
    ):
        swarm = SwarmProcesses(config, children, folder / "swarm", program=command)
        swarm.start_peers([*range(config.stages.num_stages)] * PEERS_A_STAGE)
        serve(swarm, swarm.peers)
        rows = swarm.train("trainer", rounds)
        swarm.stop()
    whole = CheckpointFolder(kept, dataclasses.replace(config, stages=StagesConfig(num_stages=1)))
    seconds_after: dict[int, float] = {}
    for row in rows:
        seconds_after[row["step"]] = max(seconds_after.values(), default=0.0) + row["train/step_time"]
    curve = []
    for number in range(every, rounds + 1, every):
        restored = whole.restore(0, held_out.shapes, round_number=number)
        if restored is None:
            raise DeadlineExceeded(f"no checkpoint of round {number} was kept")
        weights = {
            name.removeprefix("anchor/"): t for name, t in restored.tensors.items() if name.startswith("anchor/")
        }
        tokens_then = restored.run_samples * config.data.sequence_length
        curve.append((tokens_then, seconds_after[number], held_out.loss(weights)))
    return {"curve": curve, "inner_steps": inner_steps(config, rows)}


def inner_steps(config: RunConfig, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Figures about inner steps, by stage, from the peers that a trainer asked: one for each stage and round. DiLoCo
    only."""
    intended = config.rounds.round_samples / (PEERS_A_STAGE * config.rounds.inner_batch_samples)
    found = []
    for stage in range(0 if config.rounds.synchronous else config.stages.num_stages):
        named = [
            {
                name: row[f"inner/stage_{stage}/{name}"]
                for name in ("steps", "samples_per_step", "staleness", "largest_staleness")
            }
            for row in rows
            if row.get(f"inner/stage_{stage}/steps")
        ]
        count = sum(figures["steps"] for figures in named)
        found.append(
            {
                "steps_over_intended": count / (len(rows) * intended),
                "samples_per_step": sum(f["steps"] * f["samples_per_step"] for f in named) / max(1, count),
                "staleness": sum(f["steps"] * f["staleness"] for f in named) / max(1, count),
                "largest_staleness": max((f["largest_staleness"] for f in named), default=0),
            }
        )
    return found


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


def summary(runs: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One side's figures over its seeds, and ratios to plain training with the same seed."""
    losses = [figures["curve"][-1][2] for figures in runs]
    ratios = []
    for figures, other in zip(runs, plain, strict=True):
        target = target_loss(other["curve"])
        seconds, usual = seconds_until(figures["curve"], target), seconds_until(other["curve"], target)
        assert usual is not None
        ratios.append(None if seconds is None else seconds / usual)
    reached = [ratio for ratio in ratios if ratio is not None]
    return {
        "final_loss": statistics.mean(losses), "final_losses": losses,
        "seconds": statistics.mean(figures["curve"][-1][1] for figures in runs),
        "seconds_to_loss": statistics.mean(reached) if len(reached) == len(ratios) else None,
        "seconds_to_loss_by_seed": ratios, "curves": [figures["curve"] for figures in runs],
        **({"inner_steps": [figures["inner_steps"] for figures in runs]} if "inner_steps" in runs[0] else {}),
    }  # fmt: skip
