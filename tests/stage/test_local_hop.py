"""A chain whose stages share one process and one compute thread does what the same chain does over gRPC."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from swarm.config import RunConfig
from swarm.stage.boundary import GRADIENT, HIDDEN, TOKENS
from swarm.stage.computation import Computation
from tests.support.chain import (
    DILOCO,
    DROPOUT,
    INT8,
    LORA,
    SYNCHRONOUS,
    Chain,
    Peer,
    eventually,
    failures_of,
    running_chain,
    tokens,
)
from tests.support.chain_rounds import commit_round
from tests.support.manual_clock import ManualClock

ITERATIONS = 100
"""The event loop hands a microbatch on to the next block in fewer iterations."""


async def _trained(config: RunConfig, *, spans: bool) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """The losses of two rounds, and all sums of gradients and weights."""
    losses, tensors = list[float](), list[Mapping[str, torch.Tensor]]()
    async with running_chain(config, spans=spans, one_thread=spans) as chain:
        for number in range(2):
            for index in range(8 * number, 8 * number + 4):  # one by one, so that the order of the sums is the same
                losses += await chain.train_all([index], round_number=number)
            tensors.append(chain.sums())
            await commit_round(chain)
            tensors += [peer.weights.masters for peer in chain.peers]
        losses.append(await chain.evaluate({TOKENS: tokens(config, 99)}, round_number=2))
        chain.assert_idle()
        copies = [{name: tensor.detach().clone() for name, tensor in each.items()} for each in tensors]
        return losses, copies


@pytest.mark.parametrize(
    "config", [SYNCHRONOUS, DILOCO, INT8, *(pytest.param(each, marks=pytest.mark.slow) for each in (DROPOUT, LORA))]
)
async def test_one_process_computes_the_same_bits_as_several(config: RunConfig) -> None:
    (losses, tensors), (expected_losses, expected) = [await _trained(config, spans=spans) for spans in (True, False)]
    assert losses == expected_losses
    for found, wanted in zip(tensors, expected, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def _computation(peer: Peer) -> Computation:
    entry = peer.stage.ledger.find(0)
    assert entry is not None
    assert entry.computation is not None
    return entry.computation


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.data_ptr() == other.data_ptr()


async def test_tensors_are_passed_by_reference() -> None:
    async with running_chain(SYNCHRONOUS, spans=True, one_thread=True) as chain:
        reply = await chain.train(0)
        first, middle, last = (_computation(peer) for peer in chain.peers)
        assert _is_same(first.order.wire_inputs[TOKENS], middle.order.wire_inputs[TOKENS])
        assert _is_same(middle.order.wire_inputs[TOKENS], last.order.wire_inputs[TOKENS])
        assert _is_same(first._wire_hidden, middle.order.wire_inputs[HIDDEN])
        assert _is_same(middle._wire_hidden, last.order.wire_inputs[HIDDEN])
        for asks, answers in ((first, middle), (middle, last)):
            assert asks._reply is not None
            assert _is_same(answers.result().gradient, asks._reply.tensors[GRADIENT])
        await chain.ack(reply)


# -- which peer is chosen ----------------------------------------------------------------------------------------------


async def test_the_own_block_gets_the_work_while_it_has_room() -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(2, 2, 2), spans=True) as chain:
        for index in range(8):
            await chain.train_all([index])
        firsts, middles, lasts = ([peer.stage.counters["forwards"] for peer in chain.at(stage)] for stage in range(3))
        assert firsts == middles == lasts
        assert min(firsts) > 0


async def test_what_the_own_block_has_no_room_for_goes_to_others_and_bans_nobody() -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(1, 2, 1), max_in_flight=(4, 1, 4), spans=True) as chain:
        own, other = chain.at(1)
        failures = failures_of(chain.peers[0].router)
        async with chain.peers[-1].held():
            training = asyncio.create_task(chain.train_all(range(2)))
            await eventually(lambda: other.stage.admission.num_admitted == 1)
        await training
        assert own.stage.counters["busy_replies"] > 0
        assert [own.stage.counters["forwards"], other.stage.counters["forwards"]] == [1, 1]
        assert failures == []
        chain.assert_accumulated(range(2))


# -- faults of the call itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["at once", "while it computes", "with an answer"])
async def test_a_cancelled_caller_leaves_nothing(when: str) -> None:
    clock = ManualClock()
    async with running_chain(SYNCHRONOUS, clock=clock, spans=True, one_thread=True) as chain:
        if when == "with an answer":
            (await chain.train(0)).close()
        else:
            async with chain.peers[0].held():
                training = asyncio.create_task(chain.train(0))
                await asyncio.sleep(0.0 if when == "at once" else 0.1)
                training.cancel()
        await eventually(lambda: chain.is_idle and chain.states(0) == [None] * 3, meanwhile=lambda: clock.advance(0.5))
        chain.assert_accumulated([])


# -- one compute thread ------------------------------------------------------------------------------------------------


async def test_a_microbatch_goes_on_to_the_next_block_before_a_newer_one_begins() -> None:
    """However many microbatches are there, the graphs of only a few of them are kept."""
    most, loop = list[int](), asyncio.get_running_loop()

    def watch(chain: Chain, work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*of: Any, **how: Any) -> Any:
            most.append(sum(peer.backend.budget.num_kept for peer in chain.peers))
            for _ in range(ITERATIONS):
                # However slow the event loop is, it has handed on what was computed before.
                passed = threading.Event()
                loop.call_soon_threadsafe(passed.set)
                passed.wait()
            return work(*of, **how)

        return watched

    async with running_chain(SYNCHRONOUS, spans=True, one_thread=True) as chain:
        for peer in chain.peers:
            peer.backend.forward = watch(chain, peer.backend.forward)  # type: ignore[method-assign]
            peer.backend.forward_loss = watch(chain, peer.backend.forward_loss)  # type: ignore[method-assign]
        await chain.train_all(range(8))
        chain.assert_accumulated(range(8))
    # Each microbatch that is under way has at most two graphs, and the thread takes up another one only while the
    # event loop hands one on.
    assert max(most) <= 2 * 3
