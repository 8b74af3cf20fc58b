"""Evaluation and text from the trained swarm: the chain forward, on the anchor weights of one round.

Called by trainers between steps and at the end. Never trains.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches
from swarm.errors import Fatal
from swarm.hop.answers import HopListener
from swarm.hop.hop import Hop
from swarm.rpc.wire import TensorSpec
from swarm.training import samples
from swarm.training.samples import Samples

_CONCURRENCY = 4


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Losses on held-out text, in nats per target.

    Attributes:
        mean: over the held-out parts of all datasets, by their lengths.
        by_source: of each dataset, by its name.
    """

    mean: float
    by_source: Mapping[str, float]

    @property
    def of_several(self) -> Mapping[str, float]:
        """`by_source` where it says more than the mean."""
        return self.by_source if len(self.by_source) > 1 else {}


async def held_out_loss(
    hop: Hop, data: Microbatches, *, round_number: int, num_samples: int, listener: HopListener | None = None
) -> HeldOutLoss:
    """Losses over about `num_samples` held-out samples, as many of each dataset.

    Args:
        listener: hears which stage is waited for; that may last until a peer serves it.

    Raises:
        Fatal: no chain of peers holds that round's anchor (any more).
    """
    sources = data.held_out_by_source(num_samples)
    room = asyncio.Semaphore(_CONCURRENCY)

    async def one(batch: Samples) -> float:
        async with room:
            loss = await hop.evaluate(batch, round_number=round_number, listener=listener)
            assert isinstance(loss, float)
            return loss

    tasks: list[list[asyncio.Task[float]]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [[group.create_task(one(batch)) for batch in source.batches] for source in sources]
    except* Fatal as failures:
        raise Fatal(f"evaluation at round {round_number}: {failures.exceptions[0]}") from None
    losses = [[task.result() for task in own] for own in tasks]
    targets = [[samples.amount(batch).targets for batch in source.batches] for source in sources]
    means = [float(np.average(own, weights=weights)) for own, weights in zip(losses, targets, strict=True)]
    shares = [source.share * sum(weights) for source, weights in zip(sources, targets, strict=True)]
    return HeldOutLoss(
        mean=float(np.average(means, weights=shares)),
        by_source={source.name: mean for source, mean in zip(sources, means, strict=True)},
    )


async def generate(
    hop: Hop, config: RunConfig, prompt: Sequence[int], *, round_number: int, num_tokens: int, temperature: float,
    seed: int, listener: HopListener | None = None,
) -> list[int]:  # fmt: skip
    """Continue a prompt, one token after another, each through the whole chain; gives the new tokens.

    Tells `listener`, and raises Fatal, as `held_out_loss` does. Without a cache: meant for a sample at the end of a
    run, not for serving.
    """
    generator = torch.Generator().manual_seed(seed)
    logits_spec = TensorSpec(shape=(1, config.model.vocab_size), encoding="fp32")
    tokens = list(prompt)
    for _ in range(num_tokens):
        # The chain answers for the last position; the column after it is a target that is not used.
        context = torch.tensor([[*tokens[-config.data.sequence_length :], 0]], dtype=torch.int32)
        batch = samples.plain(context, config.data)
        logits = await hop.evaluate(batch, round_number=round_number, logits=logits_spec, listener=listener)
        assert isinstance(logits, torch.Tensor)
        weights = torch.softmax(logits[0] / temperature, dim=-1)
        tokens.append(int(torch.multinomial(weights, 1, generator=generator)))
    return tokens[len(prompt) :]
