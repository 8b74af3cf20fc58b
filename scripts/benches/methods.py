"""Compares the ways to train, with the same model, data and tokens: speed, memory, and what a killed worker costs.

In a second, shorter training a worker is killed (kill -9) after a third of the steps. At the end data-parallel training
and torch's own DDP loop take turns.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from peers.commands import command_line
from peers.local.supervisor import Supervisor
from scripts.benches.shared import paired
from scripts.benches.shared.common import (
    BenchOptions,
    require_known,
    require_multiple,
    run_of,
    say,
    side,
    with_corpus,
    workplace,
    write_config,
)
from scripts.benches.shared.swarm import SwarmProcesses
from swarm.config import RunConfig
from swarm.errors import DeadlineExceeded
from swarm.metrics import read as read_metrics

STATIC: Mapping[str, Sequence[str]] = {
    "single": (), "dp": ("--dp", "2"), "dp_compressed": ("--dp", "2", "--compress", "int8"),
    "fsdp": ("--dp", "2", "--fsdp", "zero3"), "tp": ("--tp", "2"), "pp": ("--pp", "2"),
}  # fmt: skip
"""Options of swarm-static, by method."""
SWARMS = ("swarm_synchronous", "swarm_diloco")
METHODS = (*STATIC, "ddp_loop", *SWARMS)
BATCH_SAMPLES, BATCHES_A_ROUND = 16, 16  # Samples of a step, and steps of a round of DiLoCo
SMOOTHED = 16  # The number of steps over which losses are averaged
SHARE_OF_STEPS = 0.8  # The loss that all methods have to reach is that of `single` after this share of its steps
WARM_UP = 5  # Steps that do not count for rates
TURNS, TURN_STEPS = 4, 64  # How often `dp` and `ddp_loop` take turns, and the steps of a turn
POLL_SECONDS = 0.1
KILL_SECONDS = 180.0  # A training that makes no progress for this long counts as stuck


Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare the ways to train."""

    methods: tuple[str, ...] = METHODS
    """Methods to measure. Figures that need other methods are left out."""
    steps: int = 240
    """Batches of 16 samples; a multiple of 16."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known(self, "methods", METHODS)
        require_multiple("steps", self.steps, BATCHES_A_ROUND)


def run(options: Options) -> dict[str, Any]:
    rows: dict[str, Rows] = {}
    found: dict[str, dict[str, Any]] = {}
    for name in options.methods:
        config, _ = with_corpus(run_config(options, name))
        with training_by(name, config, options.steps) as training:
            rows[name], memory_bytes = training.to_the_end()
        with training_by(name, config, options.steps) as training:
            found[name] = {**figures(config, rows[name], memory_bytes), "killed": training.with_a_kill()}
        say(f"{name}: {found[name]['tokens_per_second']:,.0f} tokens/s, loss {found[name]['held_out_loss']}")
    compare(found, rows)
    ratio = paired.figures({"dp_over_ddp_loop": beside_ddp_loop(options)}) if {"dp", "ddp_loop"} <= found.keys() else {}
    return {"methods": found, **ratio}


def beside_ddp_loop(options: Options) -> paired.Ratio:
    config, _ = with_corpus(run_config(options, "dp"))

    def rate(method: str, number: int) -> float:
        with training_by(method, config, TURN_STEPS) as training:
            tokens_per_second: float = figures(config, *training.to_the_end())["tokens_per_second"]
        return tokens_per_second

    sides = {method: functools.partial(rate, method) for method in ("dp", "ddp_loop")}
    turns = paired.in_turns(sides, TURNS, what="dp beside ddp_loop", unit="tokens/s")
    return paired.ratio(turns["dp"], turns["ddp_loop"])


def run_config(options: Options, method: str) -> RunConfig:
    is_diloco = method == "swarm_diloco"
    # With half of the samples in an inner batch, each of the two peers takes as many steps as the other methods do.
    return run_of(
        "methods", width=128, layers=4, head_width=32, stages=2 if method in SWARMS else 1,
        setting="diloco" if is_diloco else "synchronous", length=64, microbatch=4,
        round_samples=BATCH_SAMPLES * BATCHES_A_ROUND if is_diloco else BATCH_SAMPLES, dataset=options.dataset,
        rounds={"inner_batch_samples": BATCH_SAMPLES // 2} if is_diloco else {}, optimizer={"learning_rate": 2e-3},
    )  # fmt: skip


@contextmanager
def training_by(method: str, config: RunConfig, steps: int) -> Iterator["Training"]:
    with workplace("methods") as (folder, children):
        yield Training(method, config, folder, children, steps)


class Training:
    def __init__(self, method: str, config: RunConfig, folder: Path, children: Supervisor, steps: int) -> None:
        self._config = config
        self._rounds = steps * BATCH_SAMPLES // config.rounds.round_samples
        self._children, self._folder, self._method = children, folder, method
        self._swarm = SwarmProcesses(config, children, folder) if method in SWARMS else None
        self._metrics = folder / ("trainer" if self._swarm else "") / "metrics.jsonl"
        if self._swarm is not None:
            self._swarm.start_peers([0, 1, 0, 1])
            self._child = self._swarm.launch_trainer("trainer", self._rounds, evaluation_samples=2048)
        else:
            write_config(config, folder / "run.toml")
            self._child = children.start(method, self._command())

    def _command(self) -> list[str]:
        config, steps, metrics = map(str, (self._folder / "run.toml", self._rounds, self._metrics))
        restarts = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
        if self._method == "ddp_loop":
            # torch's loop writes no checkpoints, so a restart would begin anew.
            return [sys.executable, *restarts[:-1], "0", *side("ddp_loop", config, steps, metrics)[1:]]
        given = [
            *("--config", config, "--steps", steps, "--metrics", metrics, "--threads", "1", "--device", "cpu"),
            *("--evaluate-every", "0", "--evaluation-samples", "2048"),
            *("--checkpoint", str(self._folder / "checkpoints"), "--checkpoint-every", "20"),
        ]
        alone = command_line("static", [*given, *STATIC[self._method]])
        return alone if self._method == "single" else [sys.executable, *restarts, "--no-python", *alone]

    def _processes(self) -> list[psutil.Process]:
        roots = [psutil.Process(child.pid) for child in self._children.running]
        return [process for root in roots for process in (root, *root.children(recursive=True))]

    def _rows(self) -> list[dict[str, Any]]:
        return list(read_metrics(self._metrics)) if self._metrics.exists() else []

    def _steps(self) -> list[int]:
        return [row["step"] for row in self._rows() if "train/loss" in row]

    def to_the_end(self) -> tuple[Rows, int]:
        """Wait for the end of the training. Return its figures, and the most memory that one of its processes held.
        Raises DeadlineExceeded."""
        most_bytes = 0
        while not (ended := self._children.exits()):
            for process in self._processes():
                try:
                    most_bytes = max(most_bytes, process.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue
            time.sleep(POLL_SECONDS)
        if ended[0].returncode:
            raise DeadlineExceeded(f"{self._method} failed: {ended[0].reason}")
        return self._rows(), most_bytes

    def with_a_kill(self) -> dict[str, Any]:
        self._until(lambda: len(self._steps()) >= max(1, self._rounds // 3))
        victim = self._victim()
        before, killed_at = self._steps(), time.monotonic()
        victim.kill()
        if not self._until(lambda: len(self._steps()) > len(before)):
            return {"goes_on": False, "seconds": None, "steps_lost": max(before)}
        seconds = time.monotonic() - killed_at
        lost_rounds = max(0, max(before) + 1 - self._steps()[len(before)])
        lost = lost_rounds * self._config.rounds.round_samples // BATCH_SAMPLES
        return {"goes_on": True, "seconds": seconds, "steps_lost": lost}

    def _victim(self) -> psutil.Process:
        if self._swarm is not None:
            return psutil.Process(self._swarm.peers[-1].child.pid)
        process = psutil.Process(self._child.pid)
        return process if self._method == "single" else process.children()[-1]

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition. Return False if the training ended before, or made no progress."""
        deadline = time.monotonic() + KILL_SECONDS
        while not condition():
            if time.monotonic() > deadline or any(end.name == self._child.name for end in self._children.exits()):
                return condition()
            time.sleep(POLL_SECONDS / 10)
        return True


def figures(config: RunConfig, rows: Rows, memory_bytes: int) -> dict[str, Any]:
    steps = [row for row in rows if "train/loss" in row]
    batches = config.rounds.round_samples // BATCH_SAMPLES
    counted = steps[-(-WARM_UP // batches) :]
    held_out = [row["val/loss"] for row in rows if row.get("val/loss") is not None]
    averaged = [row["averaging/bytes"] for row in counted if row.get("averaging/bytes") is not None]
    tokens = config.rounds.round_samples * config.data.sequence_length
    activations = 2 * (config.stages.num_stages - 1) * BATCH_SAMPLES * config.data.sequence_length * 4
    return {
        "tokens_per_second": tokens / statistics.median(row["train/step_time"] for row in counted),
        "memory_bytes": memory_bytes,
        "averaged_bytes_a_step": statistics.mean(averaged) / batches if averaged else None,
        "activation_bytes_a_step": activations * config.model.d_model,
        "held_out_loss": held_out[-1] if held_out else None,
    }


def compare(found: Mapping[str, dict[str, Any]], rows: Mapping[str, Rows]) -> None:
    if "single" not in found:
        return
    losses = [loss for _, loss in curve(rows["single"])]
    target = losses[int(SHARE_OF_STEPS * len(losses)) - 1]
    for name, each in found.items():
        num_cores = 1 if name == "single" else 2
        each["scaling_efficiency"] = each["tokens_per_second"] / found["single"]["tokens_per_second"] / num_cores
        each["seconds_to_loss"] = next((seconds for seconds, loss in curve(rows[name]) if loss <= target), None)


def curve(rows: Rows) -> list[tuple[float, float]]:
    """Pairs of the seconds of training and the mean of the last losses at that time."""
    steps = [row for row in rows if "train/loss" in row]
    seconds, points = 0.0, list[tuple[float, float]]()
    # With DiLoCo a row is a round, and its loss is already a mean.
    width = min(SMOOTHED, max(1, len(steps) // 10))
    for number, row in enumerate(steps):
        seconds += row["train/step_time"]
        recent = steps[max(0, number + 1 - width) : number + 1]
        points.append((seconds, statistics.mean(each["train/loss"] for each in recent)))
    return points
