"""Losses of the trained swarm on held-out text: a forward through all stages, on the anchor weights of one round.

Called by trainers between steps and at the end. Never trains.
"""

import asyncio
from contextlib import closing

from swarm.data.held_out import HeldOutLoss, averaged
from swarm.data.microbatches import Microbatches
from swarm.errors import Fatal, Overloaded
from swarm.hop.answers import HopListener
from swarm.hop.hop import Hop

CONCURRENCY = 4
"""How many chains of peers hold the round and compute at the same time."""


async def held_out_loss(
    hop: Hop, data: Microbatches, *, round_number: int, num_samples: int, listener: HopListener | None = None
) -> HeldOutLoss:
    """Compute losses over about `num_samples` held-out samples, equally many of each dataset.

    Peers hold the round's weights meanwhile, so that the evaluation may take longer than a round.

    Args:
        listener: called with the stage that is waited for. The wait may last until a peer serves that stage.

    Raises:
        Fatal: no chain of peers can hold that round, or not any more.
    """
    sources = data.held_out_by_source(num_samples)
    batches = [batch for source in sources for batch in source.batches]
    waiting = iter(enumerate(batches))
    losses = [0.0] * len(batches)

    async def work() -> None:
        with closing(await hop.hold(round_number, listener)) as hold:
            for number, batch in waiting:
                losses[number] = await hop.evaluate(batch, hold.held, listener)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(CONCURRENCY, len(batches))):
                group.create_task(work())
    except* (Fatal, Overloaded) as failures:
        raise Fatal(f"evaluation at round {round_number}: {failures.exceptions[0]}") from None
    return averaged(sources, losses)
