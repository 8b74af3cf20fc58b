"""How an evaluation uses a hop's answers."""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import pytest
import torch

from peers.trainer.held_out_loss import Along, Rerouting, held_out_loss
from swarm.data.microbatches import HeldOut, HeldOutLoss, Microbatches
from swarm.errors import Fatal
from swarm.hop.answers import HopListener
from swarm.hop.hop import Hop
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.training.samples import TOKENS
from tests.support.chain import SYNCHRONOUS
from tests.support.virtual_time import in_virtual_time

ROUND = 3
LISTENER = HopListener()
HELD = (pb.HeldRound(peer_id="a", round=ROUND),)
LENGTH = SYNCHRONOUS.data.sequence_length


class Texts:
    """Datasets, each with batches of the given sizes; each batch is filled with its number."""

    def __init__(self, *sizes: Sequence[int], shares: Sequence[float]) -> None:
        numbers = itertools.count()
        self.sources = [
            HeldOut(name=f"text {source}", batches=[self._batch(next(numbers), size) for size in own], share=share)
            for source, (own, share) in enumerate(zip(sizes, shares, strict=True))
        ]

    @staticmethod
    def _batch(number: int, size: int) -> dict[str, torch.Tensor]:
        return {TOKENS: torch.full((size, LENGTH + 1), number, dtype=torch.int32)}

    def held_out_by_source(self, num_samples: int) -> list[HeldOut]:
        assert num_samples == sum(len(batch[TOKENS]) for source in self.sources for batch in source.batches)
        return self.sources


class Scorer:
    """A hop that answers the batch filled with n with the n-th loss, and answers later batches first."""

    def __init__(self, *losses: float | Fatal) -> None:
        self.losses = losses
        self.num_running = self.most_running = self.num_held = 0
        self.held_along = set[int]()
        self.path_of: dict[int, int] = {}

    async def hold(self, newest_round: int, listener: HopListener | None, *, path: int) -> "Held":
        assert (newest_round, listener) == (ROUND, LISTENER)
        self.held_along.add(path)
        self.num_held += 1
        return Held(self)

    async def evaluate(
        self, tensors: Mapping[str, torch.Tensor], held: Sequence[pb.HeldRound], listener: HopListener | None, *,
        path: int,
    ) -> float:  # fmt: skip
        assert (held, listener) == (HELD, LISTENER)
        assert self.num_held
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        number = int(tensors["tokens"][0, 0])
        self.path_of[number] = path
        await asyncio.sleep(1.0 / (1 + number))
        self.num_running -= 1
        loss = self.losses[number]
        if isinstance(loss, Fatal):
            raise loss
        return loss


class Held:
    held = HELD

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def close(self) -> None:
        self._scorer.num_held -= 1


async def evaluation(
    scorer: Scorer, *sizes: Sequence[int], shares: Sequence[float] = (1.0,), paths: Sequence[int] = (0,),
    own: Sequence[tuple[int, ...]] = (), rerouting: Rerouting | None = None,
    evaluated: Callable[[int, int], None] = lambda done, of_all: None,
) -> HeldOutLoss:  # fmt: skip
    """Evaluate along some paths; `own` are those of each dataset."""
    texts = Texts(*sizes, shares=shares)
    for number, each in enumerate(own):
        texts.sources[number] = dataclasses.replace(texts.sources[number], paths=each)
    alongs = [Along(path, cast(Hop, scorer), LISTENER) for path in paths]
    data = cast(Microbatches, texts)
    return await held_out_loss(
        alongs, data, round_number=ROUND, num_samples=sum(map(sum, sizes)), rerouting=rerouting, evaluated=evaluated
    )


@in_virtual_time
async def test_the_loss_is_the_mean_over_targets_and_not_over_batches() -> None:
    heard: list[tuple[int, int]] = []
    found = await evaluation(Scorer(1.0, 2.0, 4.0), (2, 2, 1), shares=[7.5], evaluated=lambda *done: heard.append(done))
    assert found == HeldOutLoss(mean=2.0, by_source={"text 0": 2.0})
    assert not found.of_several
    assert heard == [(1, 3), (2, 3), (3, 3)]


@in_virtual_time
async def test_each_dataset_has_a_loss_and_weighs_in_the_mean_as_much_as_it_is_long() -> None:
    """Equally many samples are taken of a long dataset and of a short one."""
    found = await evaluation(Scorer(1.0, 4.0, 5.0), (2, 1), (3,), shares=[10.0, 1.0])
    assert found.by_source == found.of_several == {"text 0": 2.0, "text 1": 5.0}
    assert found.mean == pytest.approx((30 * 2.0 + 3 * 5.0) / 33)


@in_virtual_time
async def test_each_dataset_of_its_own_paths_is_evaluated_along_these() -> None:
    scorer = Scorer(*map(float, range(5)))
    found = await evaluation(scorer, (2, 2), (2, 2, 2), shares=[1.0, 1.0], paths=range(4), own=[(1,), (0, 3)])
    assert scorer.path_of == {0: 1, 1: 1, 2: 0, 3: 3, 4: 0}
    assert scorer.held_along == {0, 1, 3}
    assert found.by_source == {"text 0": 0.5, "text 1": 3.0}


@in_virtual_time
async def test_a_dataset_of_all_paths_is_evaluated_along_one_after_another() -> None:
    scorer = Scorer(*[1.0] * 40)
    await evaluation(scorer, [2] * 40, paths=range(16))
    assert scorer.path_of == {number: number % 16 for number in range(40)}
    assert scorer.most_running == 4
    assert scorer.num_held == 0


@in_virtual_time
async def test_a_dataset_whose_paths_stand_still_is_left_out() -> None:
    scorer = Scorer(1.0, 2.0, 4.0)
    found = await evaluation(scorer, (2,), (2,), (2,), shares=[1.0, 1.0, 1.0], paths=(0, 2), own=[(0,), (1,), (2,)])
    assert found.by_source == {"text 0": 1.0, "text 2": 4.0}
    assert 1 not in scorer.path_of
