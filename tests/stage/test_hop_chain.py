"""Microbatches through real servers: gradients are those of one process, and nothing is left behind."""

import asyncio
import dataclasses
import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch

from swarm.config import Amendment, RunConfig, WireConfig
from swarm.model.stages import build_transformer
from swarm.stage.boundary import TOKENS
from swarm.training import samples
from tests.support.chain import (
    ANY_HOP,
    DILOCO,
    DROPOUT,
    LORA,
    SYNCHRONOUS,
    eventually,
    reference,
    running_chain,
    samples_of,
    tokens,
)
from tests.support.locked import OWNER
from tests.support.partial import partial_config
from tests.support.rounding import RoundingModel, rounding_reference

_SHARDS = dataclasses.replace(
    SYNCHRONOUS, model=dataclasses.replace(DROPOUT.model, block_types=("parallel", "tp", "spd"), num_shards=2)
)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "graph_bytes"),
    [*((config, 1 << 30) for config in (SYNCHRONOUS, DILOCO, DROPOUT, LORA, _SHARDS)), (SYNCHRONOUS, 0), (DROPOUT, 0)],
)
async def test_a_chain_accumulates_the_gradient_of_one_process(config: RunConfig, graph_bytes: int) -> None:
    """Several microbatches are in flight, and graphs are kept or computed again."""
    async with running_chain(config, graph_bytes=graph_bytes) as chain:
        losses = await chain.train_all(range(6))
        assert losses == pytest.approx(reference(config, range(6))[0], abs=1e-5)
        chain.assert_accumulated(range(6))
        chain.assert_idle()
        assert chain.counts("committed") == chain.counts("forwards") == chain.counts("backwards") == [6, 6, 6]


@ANY_HOP
@pytest.mark.parametrize(("dtype", "before"), [("bf16", "int8"), ("fp16", ""), ("int8", "")])
async def test_a_chain_that_rounds_is_one_process_that_rounds_there(dtype: Any, before: Any) -> None:
    """The same holds for its evaluation. Token ids are not rounded. One run began with another type."""
    config = dataclasses.replace(DROPOUT, wire=WireConfig(dtype=dtype), owner=OWNER.authority.fingerprint)
    begun = dataclasses.replace(config, wire=WireConfig(dtype=before or dtype))
    batch = tokens(config, 99)
    async with running_chain(begun) as chain:
        for timeline in [peer.weights.timeline for peer in chain.peers if before]:
            timeline.add([Amendment.sign(OWNER, timeline, 0, [f"wire.dtype={dtype}"]).text])
        losses = await chain.train_all(range(4))
        expected_losses, expected = rounding_reference(config, range(4))
        assert losses == pytest.approx(expected_losses, rel=1e-4)
        for name, value in chain.sums().items():
            assert float((value - expected[name]).norm()) <= 1e-4 * float(expected[name].norm()), name
        loss = await chain.evaluate({TOKENS: batch})
        assert loss == pytest.approx(float(RoundingModel(config).loss(batch, None).detach()), rel=1e-4)
        chain.assert_idle()


@ANY_HOP
async def test_conversations_are_learnt_as_in_one_process() -> None:
    """The rows hold several documents with few targets, and one microbatch has none."""
    config = partial_config(num_stages=3)
    batch = samples_of(config, 7)
    async with running_chain(config, num_peers=(1, 2, 1)) as chain:
        losses = await chain.train_all(range(4))
        assert losses == pytest.approx(reference(config, range(4))[0], abs=1e-5)
        chain.assert_accumulated(range(4))
        loss = await chain.evaluate(batch)
        with torch.no_grad():
            expected = float(build_transformer(config, device="cpu").summed_loss(batch))
        assert loss == pytest.approx(expected / samples.amount(batch).targets, abs=1e-5)
        chain.assert_idle()


async def test_a_task_whose_task_group_has_failed_before_is_not_taken_for_cancelled() -> None:
    """For example, an evaluation is repeated because the swarm went on, and then a sample of text is written."""

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError

    async with running_chain(SYNCHRONOUS) as chain:
        with suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
        await chain.ack(await chain.train(0))
        chain.assert_accumulated([0])


# -- versions ----------------------------------------------------------------------------------------------------------


@ANY_HOP
async def test_nothing_is_left_of_a_microbatch_that_counts() -> None:
    """With DiLoCo this holds without garbage collection. A leftover would keep an inner step's weights and bucket in
    memory."""
    gc.disable()
    try:
        async with running_chain(DILOCO) as chain:
            reply = await chain.train(0)
            entries = [peer.stage.ledger.find(0) for peer in chain.peers]
            computations = [weakref.ref(entry.computation) for entry in entries if entry and entry.computation]
            assert len(computations) == 3
            await chain.ack(reply)
            del reply
            await eventually(lambda: not any(computation() for computation in computations))
    finally:
        gc.enable()
