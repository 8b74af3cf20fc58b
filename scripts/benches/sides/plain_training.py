"""A process that trains a whole model without a swarm, for the bench `learning`.

Its last line of stdout is a JSON list of points: tokens, seconds of training until then, held-out loss.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from scripts.benches.shared.common import compute_like_peers, with_corpus
from scripts.benches.sides.reference import HeldOut, Reference, is_point
from swarm import config as configs
from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches
from swarm.training import optim
from swarm.training.optimizers import gradient_optimizer


class PlainDiloco:
    """DiLoCo's workers in one process, with the swarm's initial weights. Each of n gets every n-th microbatch."""

    def __init__(self, config: RunConfig, data: Microbatches, num_workers: int) -> None:
        self._config = config
        self._whole = Reference(config, data)
        self._anchor = {name: value.clone() for name, value in self._whole.weights.items()}
        self._inner = [gradient_optimizer(config, same_bits=False) for _ in range(num_workers)]
        self._outer = optim.OuterSgd(config.outer_step)

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._anchor

    def step(self, number: int) -> float:
        size = self._config.microbatches_per_round
        loss, amounts = 0.0, list[int]()
        learnt: list[Mapping[str, torch.Tensor]] = []
        for worker, optimizer in enumerate(self._inner):
            indices = range(number * size + worker, (number + 1) * size, len(self._inner))
            self._whole.load(self._anchor)
            own_loss, num_targets = self._inner_steps(optimizer, indices, number)
            loss, amounts = loss + own_loss, [*amounts, num_targets]
            learnt.append({name: self._anchor[name] - value for name, value in self._whole.weights.items()})
        weights = torch.tensor(amounts) / sum(amounts)
        average = {
            name: torch.tensordot(weights, torch.stack([each[name] for each in learnt]), 1) for name in self._anchor
        }
        optim.step(self._outer, self._anchor, average, self._config.outer_step.learning_rate)
        return loss / sum(amounts)

    def _inner_steps(self, optimizer: optim.Optimizer, indices: Sequence[int], number: int) -> tuple[float, int]:
        rounds, size = self._config.rounds, self._config.data.microbatch_size
        batch = rounds.inner_batch_samples // size
        loss, num_targets = 0.0, 0
        for first in range(0, len(indices), batch):
            chosen = indices[first : first + batch]
            of_step = self._whole.accumulate_mean(dict.fromkeys(chosen, 1))
            loss, num_targets = loss + of_step[0], num_targets + of_step[1]
            self._whole.update_with(optimizer, number * rounds.round_samples + first * len(self._inner) * size)
        return loss, num_targets


def train(
    training: Reference | PlainDiloco, config: RunConfig, rounds: int, points: int,
    measure: Callable[[Mapping[str, torch.Tensor]], float],
) -> list[tuple[int, float, float]]:  # fmt: skip
    """Train this many rounds, and measure the loss at this many points. Only training counts as time."""
    curve: list[tuple[int, float, float]] = []
    seconds = 0.0
    for number in range(rounds):
        started_at = time.perf_counter()
        training.step(number)
        seconds += time.perf_counter() - started_at
        if is_point(number, rounds, points):
            tokens = (number + 1) * config.rounds.round_samples * config.data.sequence_length
            curve.append((tokens, seconds, measure(training.weights)))
    return curve


def main(path: Path, num_workers: int, rounds: int, points: int) -> None:
    compute_like_peers(torch.get_num_threads())
    config, data = with_corpus(configs.load(path))
    training: Reference | PlainDiloco
    training = Reference(config, data) if config.rounds.synchronous else PlainDiloco(config, data, num_workers)
    print(json.dumps(train(training, config, rounds, points, HeldOut(config, data).loss)))
