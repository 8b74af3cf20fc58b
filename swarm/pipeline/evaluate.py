"""Evaluation and text from the trained swarm: the chain forward, on the anchor weights of one round.

Called by trainers between steps and at the end. Never trains.
"""

import asyncio
from collections.abc import Sequence

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


async def held_out_loss(
    hop: Hop, data: Microbatches, *, round_number: int, num_samples: int, listener: HopListener | None = None
) -> float:
    """Mean loss in nats per target over about `num_samples` held-out samples.

    Args:
        listener: hears which stage is waited for; that may last until a peer serves it.

    Raises:
        Fatal: no chain of peers holds that round's anchor (any more).
    """
    batches = data.held_out(num_samples)
    room = asyncio.Semaphore(_CONCURRENCY)

    async def one(batch: Samples) -> float:
        async with room:
            loss = await hop.evaluate(batch, round_number=round_number, listener=listener)
            assert isinstance(loss, float)
            return loss

    tasks: list[asyncio.Task[float]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(batch)) for batch in batches]
    except* Fatal as failures:
        raise Fatal(f"evaluation at round {round_number}: {failures.exceptions[0]}") from None
    weights = [samples.amount(batch).targets for batch in batches]
    return float(np.average([task.result() for task in tasks], weights=weights))


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
