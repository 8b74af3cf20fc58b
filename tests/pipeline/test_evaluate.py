"""What evaluation and generation make of a hop's answers."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import cast

import pytest
import torch

from swarm.data.microbatches import HeldOut, Microbatches
from swarm.errors import Fatal
from swarm.hop.answers import HopListener
from swarm.hop.hop import Hop
from swarm.pipeline.evaluate import HeldOutLoss, generate, held_out_loss
from swarm.rpc.wire import TensorSpec
from swarm.training.samples import TOKENS
from tests.support.chain import SYNCHRONOUS
from tests.support.virtual_time import in_virtual_time

ROUND = 3
LISTENER = HopListener()
LENGTH, VOCABULARY = SYNCHRONOUS.data.sequence_length, SYNCHRONOUS.model.vocab_size


class Texts:
    """Of each dataset, batches of so many samples, each filled with its number."""

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
    """A hop that answers the batch filled with n with the n-th loss, the later ones first."""

    def __init__(self, *losses: float | Fatal) -> None:
        self.losses = losses
        self.num_running = self.most_running = 0

    async def evaluate(
        self, tensors: Mapping[str, torch.Tensor], *, round_number: int, listener: HopListener | None
    ) -> float:
        assert (round_number, listener) == (ROUND, LISTENER)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        number = int(tensors["tokens"][0, 0])
        await asyncio.sleep(1.0 / (1 + number))
        self.num_running -= 1
        loss = self.losses[number]
        if isinstance(loss, Fatal):
            raise loss
        return loss


async def evaluation(scorer: Scorer, *sizes: Sequence[int], shares: Sequence[float] = (1.0,)) -> HeldOutLoss:
    hop, data = cast(Hop, scorer), cast(Microbatches, Texts(*sizes, shares=shares))
    return await held_out_loss(hop, data, round_number=ROUND, num_samples=sum(map(sum, sizes)), listener=LISTENER)


@in_virtual_time
async def test_the_loss_is_the_mean_over_targets_and_not_over_batches() -> None:
    found = await evaluation(Scorer(1.0, 2.0, 4.0), (2, 2, 1), shares=[7.5])
    assert found == HeldOutLoss(mean=2.0, by_source={"text 0": 2.0})
    assert not found.of_several


@in_virtual_time
async def test_each_dataset_has_a_loss_and_weighs_in_the_mean_as_much_as_it_is_long() -> None:
    """As many samples are taken of a long one as of a short one."""
    found = await evaluation(Scorer(1.0, 4.0, 5.0), (2, 1), (3,), shares=[10.0, 1.0])
    assert found.by_source == found.of_several == {"text 0": 2.0, "text 1": 5.0}
    assert found.mean == pytest.approx((30 * 2.0 + 3 * 5.0) / 33)


@in_virtual_time
async def test_who_cannot_evaluate_says_at_which_round() -> None:
    with pytest.raises(Fatal, match=r"^evaluation at round 3: nobody holds it$"):
        await evaluation(Scorer(1.0, Fatal("nobody holds it"), 4.0), (2, 2, 1))


@in_virtual_time
async def test_four_batches_at_once_and_no_more() -> None:
    scorer = Scorer(*[1.0] * 11)
    await evaluation(scorer, [2] * 11)
    assert scorer.most_running == 4


class Speaker:
    """A hop that finds one token likeliest at each position, or all alike."""

    def __init__(self, *likeliest: int) -> None:
        self.likeliest = likeliest
        self.requests: list[list[list[int]]] = []

    async def evaluate(
        self, tensors: Mapping[str, torch.Tensor], *, round_number: int, logits: TensorSpec,
        listener: HopListener | None,
    ) -> torch.Tensor:  # fmt: skip
        assert (round_number, listener) == (ROUND, LISTENER)
        assert tensors["tokens"].dtype == torch.int32
        scores = torch.zeros(logits.shape)
        if self.likeliest:
            scores[0, self.likeliest[len(self.requests)]] = 1.0
        self.requests.append(tensors["tokens"].tolist())
        return scores


async def text(
    speaker: Speaker, prompt: Sequence[int], num_tokens: int, *, temperature: float = 1.0, seed: int = 0
) -> list[int]:
    return await generate(
        cast(Hop, speaker), SYNCHRONOUS, prompt, round_number=ROUND, num_tokens=num_tokens, temperature=temperature,
        seed=seed, listener=LISTENER,
    )  # fmt: skip


async def test_each_token_follows_from_the_last_ones_alone() -> None:
    """Of a prompt that is too long, as many as the model takes; the column after them is no token."""
    speaker = Speaker(7, 0, 63)
    prompt = list(range(LENGTH + 4))
    # So cold that a score higher by 1 is certain: the other tokens are e ** -100 times as likely.
    assert await text(speaker, prompt, 3, temperature=0.01) == [7, 0, 63]
    seen = [*prompt, 7, 0]
    assert speaker.requests == [[[*seen[start : start + LENGTH], 0]] for start in (4, 5, 6)]


async def test_a_short_prompt_is_seen_whole() -> None:
    speaker = Speaker(5, 6)
    assert await text(speaker, [1, 2], 2, temperature=0.01) == [5, 6]
    assert speaker.requests == [[[1, 2, 0]], [[1, 2, 5, 0]]]


async def test_a_seed_is_a_text() -> None:
    texts = [await text(Speaker(), [1], 20, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert all(0 <= token < VOCABULARY for token in texts[0])
    assert len(set(texts[0])) > 1
