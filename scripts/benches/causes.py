"""Finds what a DiLoCo run loses against one process, cause by cause: one thing is changed at a time, without a swarm.

Each row trains the same small model on the same samples, from the same initial weights. It differs in one thing from
another row, which it names. The model, the optimizers and the outer step are the swarm's own code. A row's `share` is
the rise of the held-out loss that the change causes, relative to the other row's loss with the same seed. The trainings
are short and the model is small, so only the order of the differences means something, and not their size.
"""

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from peers.shared import cli
from scripts.benches.shared import paired
from scripts.benches.shared.common import BenchOptions, compute_like_peers, require_multiple, say, with_corpus
from scripts.benches.shared.held_out import HeldOut
from scripts.benches.shared.judged import LESS
from scripts.benches.sides.plain_training import PlainDiloco, Training
from scripts.benches.sides.reference import Reference
from swarm.config import DataConfig, ModelConfig, OptimizerConfig, OuterConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.data.microbatches import Microbatches

BATCH = 12
"""Samples of a step of one process."""
SEQUENCE_LENGTH = 32
WARMUP_ITERATIONS = 50
MEAN = (1.0, 0.0)
"""Outer rate and momentum with which a round's result is the mean of the workers' weights."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train.

    Attributes:
        against: the row that differs in one thing; empty for the first one.
        workers: how many workers there are; 1 is a process that takes a step on every batch.
        batch: samples of a step.
        steps: the steps that a worker takes between two averages.
        outer: rate and momentum of the outer step.
        delayed: whether gradients are computed with the weights before the last step, as in PipeDream-2BW (arXiv
            2006.09503).
        corrected: whether a step also corrects the last one, which used a late gradient. The difference between this
            delayed step and the last one is added (like error feedback, arXiv 2606.30634).
    """

    against: str = ""
    workers: int = 1
    batch: int = BATCH
    steps: int = 1
    outer: tuple[float, float] = MEAN
    optimizer: Literal["adamw", "muon"] = "adamw"
    delayed: bool = False
    corrected: bool = False


LONG_MOMENTUM, SHORT_MOMENTUM = (0.7, 0.9), (0.7, 0.5)
ROWS: Mapping[str, Row] = {
    "single": Row(),
    "half_the_steps": Row(against="single", batch=24),
    "two_workers": Row(against="half_the_steps", workers=2, steps=10),
    "rare_averages": Row(against="two_workers", workers=2, steps=50),
    "half_batches": Row(against="rare_averages", workers=2, steps=50, batch=6),
    "long_momentum": Row(against="half_batches", workers=2, steps=50, batch=6, outer=LONG_MOMENTUM),
    "short_momentum": Row(against="half_batches", workers=2, steps=50, batch=6, outer=SHORT_MOMENTUM),
    "short_rounds": Row(against="half_batches", workers=2, steps=20, batch=6),
    "short_rounds_long_momentum": Row(against="short_rounds", workers=2, steps=20, batch=6, outer=LONG_MOMENTUM),
    "short_rounds_short_momentum": Row(against="short_rounds", workers=2, steps=20, batch=6, outer=SHORT_MOMENTUM),
    "muon": Row(against="single", optimizer="muon"),
    "muon_workers": Row(against="short_momentum", workers=2, steps=50, batch=6, outer=SHORT_MOMENTUM, optimizer="muon"),
    "delay": Row(against="single", delayed=True),
    "delay_corrected": Row(against="delay", delayed=True, corrected=True),
    "muon_delay": Row(against="muon", optimizer="muon", delayed=True),
    "muon_delay_corrected": Row(against="muon_delay", optimizer="muon", delayed=True, corrected=True),
}
JUDGED = {"rows.*.loss": LESS}


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Find out what a DiLoCo run loses, and by what."""

    rows: tuple[str, ...] = tuple(ROWS)
    """What to train."""
    seeds: int = 3
    """Seeds of data and initial weights: 0, 1, ..."""
    iterations: int = 1000
    """Batches of 12 samples; a multiple of 100."""
    d_model: int = 32
    """Width of the model; a multiple of 32."""
    num_layers: int = 2
    """Number of the model's layers."""
    learning_rate: float = 5e-3
    """Peak of the rate, which falls to a tenth by a cosine."""

    def __post_init__(self) -> None:
        cli.require_known(self, "rows", ROWS)
        cli.require_at_least(self, {"seeds": 1, "num_layers": 1})
        require_multiple("iterations", self.iterations, 100)
        require_multiple("d-model", self.d_model, 32)


class Delayed:
    """Training in one process, with gradients that are a step late."""

    def __init__(self, config: RunConfig, data: Microbatches, *, corrected: bool) -> None:
        self._reference = Reference(config, data)
        self._before = _copies(self._reference.weights)
        self._size = config.microbatches_per_round
        self._corrected = corrected
        self._last_step: Mapping[str, torch.Tensor] | None = None

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The newest weights."""
        return self._reference.weights

    def step(self, number: int) -> float:
        """Train round `number`, and return its mean loss."""
        newest = _copies(self.weights)
        self._reference.load(self._before)
        loss, num_targets = self._reference.accumulate_mean(
            dict.fromkeys(range(number * self._size, (number + 1) * self._size), 1)
        )
        self._reference.load(newest)
        self._reference.update(number)
        self._before = newest
        if self._corrected:
            step = {name: value - newest[name] for name, value in self.weights.items()}
            if self._last_step is not None:
                last = self._last_step
                self._reference.load({name: w + step[name] - last[name] for name, w in self.weights.items()})
            self._last_step = step
        return loss / num_targets


def _copies(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in weights.items()}


def run(options: Options) -> dict[str, Any]:
    """Train every row with every seed, and return the figures."""
    compute_like_peers()
    losses: dict[str, list[float]] = {name: [] for name in options.rows}
    for seed in range(options.seeds):
        for name in options.rows:
            started_at = time.monotonic()
            losses[name].append(train(ROWS[name], run_config(options, ROWS[name], seed)))
            say(f"{name}, seed {seed}: {losses[name][-1]:.4f} after {time.monotonic() - started_at:.0f} s")
    return {"rows": summary(losses), "samples": BATCH * options.iterations}


def run_config(options: Options, row: Row, seed: int) -> RunConfig:
    """The run that a row trains."""
    rate, momentum = row.outer
    return RunConfig(
        run="bench-causes",
        model=ModelConfig(
            num_layers=options.num_layers, d_model=options.d_model, num_heads=options.d_model // 32, vocab_size=256
        ),
        stages=StagesConfig(num_stages=1),
        data=DataConfig(
            dataset=options.dataset,
            seed=seed,
            sequence_length=SEQUENCE_LENGTH,
            # Samples come in the same order, whatever the size of the batch.
            microbatch_size=row.batch,
            held_out_fraction=0.1,
        ),
        rounds=RoundsConfig(
            # There is only one process, so no two need the same bits.
            setting="diloco",
            round_samples=row.workers * row.steps * row.batch,
            inner_batch_samples=row.batch,
        ),
        optimizer=OptimizerConfig(
            name=row.optimizer,
            learning_rate=options.learning_rate,
            weight_decay=0.1,
            schedule="cosine",
            warmup_samples=WARMUP_ITERATIONS * BATCH,
            total_samples=options.iterations * BATCH,
        ),
        outer=OuterConfig(learning_rate=rate, momentum=momentum),
    )


def train(row: Row, config: RunConfig) -> float:
    """Train on as many samples as every row does, and return the held-out loss."""
    config, data = with_corpus(config)
    training = _training(row, config, data)
    for number in range(config.optimizer.total_samples // config.rounds.round_samples):
        training.step(number)
    return HeldOut(config, data).loss(training.weights)


def _training(row: Row, config: RunConfig, data: Microbatches) -> Training:
    if row.workers > 1:
        return PlainDiloco(config, data, row.workers)
    return Delayed(config, data, corrected=row.corrected) if row.delayed else Reference(config, data)


def summary(losses: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """For each row, its loss over the seeds, and what its change costs, if the other row was trained as well."""
    found: dict[str, Any] = {}
    for name, by_seed in losses.items():
        found[name] = {"loss": statistics.mean(by_seed), "losses": list(by_seed), **dataclasses.asdict(ROWS[name])}
        if (against := ROWS[name].against) in losses:
            shares = [ours / theirs - 1.0 for ours, theirs in zip(by_seed, losses[against], strict=True)]
            found[name] |= {"share": statistics.mean(shares), "share_spread": paired.spread(shares)}
    return found
