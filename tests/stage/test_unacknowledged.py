"""Answers that nobody acknowledges: their gradients are removed at every stage, unless a retry comes in time."""

import asyncio
import dataclasses
from contextlib import AsyncExitStack
from typing import Any

import pytest

from swarm.config import RunConfig
from swarm.errors import PeerUnavailable
from swarm.rpc.ask import Stream
from swarm.rpc.serving import server_options
from swarm.stage import servicer
from swarm.stage.ledger import EntryState
from swarm.training.samples import Microbatch
from swarm.types import Block
from tests.support import chain as support
from tests.support.chain import (
    ANY_HOP,
    BOTH,
    DILOCO,
    ORPHAN_SECONDS,
    SYNCHRONOUS,
    Chain,
    Peer,
    eventually,
    running_chain,
)
from tests.support.manual_clock import ManualClock
from tests.support.proxy import Direction, Proxy


@ANY_HOP
@BOTH
async def test_an_answer_that_nobody_acknowledges_is_rolled_back_at_every_stage(config: RunConfig) -> None:
    clock = ManualClock()
    async with running_chain(config, clock=clock) as chain:
        await chain.train_all([1])
        reply = await chain.train(0)
        reply.close()
        await eventually(lambda: chain.peers[0].stage.admission.num_admitted == 0)
        clock.advance(ORPHAN_SECONDS - 0.1)
        await asyncio.sleep(0.05)
        assert chain.states(0) == [EntryState.TENTATIVE] * 3, "a retry may still come"
        await eventually(lambda: chain.states(0) == [None] * 3, meanwhile=lambda: clock.advance(0.5))
        # The ledger forgets the gradient at once. The compute threads take it out of the sum later.
        await eventually(lambda: chain.is_idle)
        chain.assert_accumulated([1])
        assert chain.counts("rolled_back") == [1, 1, 1]
        await chain.train_all([0])
        chain.assert_accumulated([0, 1])


@ANY_HOP
@BOTH
async def test_a_retry_in_time_adopts_what_was_left(config: RunConfig) -> None:
    clock = ManualClock()
    async with running_chain(config, clock=clock) as chain:
        (await chain.train(0)).close()
        await eventually(lambda: chain.peers[0].stage.admission.num_admitted == 0)
        clock.advance(ORPHAN_SECONDS - 0.1)
        reply = await chain.train(0)
        for _ in range(20):
            clock.advance(ORPHAN_SECONDS)
            await asyncio.sleep(0.005)
        await chain.ack(reply)
        assert chain.states(0) == [EntryState.COMMITTED] * 3
        assert chain.counts("rolled_back") == [0, 0, 0]
        chain.assert_accumulated([0])
        await eventually(lambda: chain.is_idle)


@BOTH
async def test_a_cancellation_that_is_answered_with_a_broken_connection_is_still_one(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC raises this error if the connection breaks at that moment."""
    read = Stream.read

    async def read_what_broke(*args: Any) -> Any:
        try:
            return await read(*args)
        except asyncio.CancelledError:
            raise PeerUnavailable("Stream removed") from None

    monkeypatch.setattr(Stream, "read", read_what_broke)
    clock = ManualClock()
    async with running_chain(config, num_peers=(1, 2, 1), clock=clock) as chain:
        last = chain.at(2)[0]
        async with last.held():
            training = asyncio.create_task(chain.train(0))
            await eventually(lambda: len(last.stage.ledger) == 1)
            training.cancel()
            await asyncio.wait([training])
            assert training.cancelled()
        await eventually(lambda: chain.states(0) == [None] * 4, meanwhile=lambda: clock.advance(0.5))
        await eventually(lambda: chain.is_idle)
        assert sum(chain.counts("forwards")[:3]) == 2, "nobody else is asked"
        chain.assert_accumulated([])


@ANY_HOP
@BOTH
async def test_what_a_dead_trainer_had_under_way_is_not_computed_any_more(config: RunConfig) -> None:
    """Stage 0 gives it up at once, because a trainer retries elsewhere. At later stages a retry could join it."""
    clock = ManualClock()
    async with running_chain(config, clock=clock) as chain:
        last = chain.at(2)[0]
        async with last.held():
            training = asyncio.create_task(chain.train(0))
            await eventually(lambda: len(last.stage.ledger) == 1)
            training.cancel()
            waits = EntryState.RUNNING if config.rounds.synchronous else None
            await eventually(lambda: chain.states(0) == [None, waits, waits])
        await eventually(lambda: chain.states(0) == [None] * 3, meanwhile=lambda: clock.advance(0.5))
        await eventually(lambda: chain.is_idle)
        # The last stage had begun. It goes on if a stage waits for it that may still get a retry.
        computed = [0, 0, int(config.rounds.synchronous)]
        assert (chain.counts("backwards"), chain.counts("rolled_back")) == (computed, computed)
        chain.assert_accumulated([])


async def test_a_lost_ack_ends_in_missing_and_a_replay_mends_it() -> None:
    """An ack is lost between the first stage and the second. So the microbatch counts only before that place."""
    clock = ManualClock()
    async with running_chain(SYNCHRONOUS, clock=clock) as chain:
        first, middle, _ = chain.peers
        async with Proxy("127.0.0.1", int(middle.record.endpoint.rpartition(":")[2])) as proxy:
            first.router.update(Block(1), [middle.record.model_copy(update={"endpoint": proxy.address})])
            reply = await chain.train(0)
            proxy.refuse()
            proxy.cut()
            await chain.ack(reply)
        first.router.update(Block(1), [middle.record])
        await eventually(
            lambda: chain.states(0) == [EntryState.COMMITTED, None, None], meanwhile=lambda: clock.advance(0.5)
        )
        await eventually(lambda: chain.num_samples() == [2, 0, 0])
        await chain.train_all([0], accumulate_only_at=1)
        await chain.train_all([0], accumulate_only_at=2)
        chain.assert_accumulated([0])
        await eventually(lambda: chain.is_idle)


@BOTH
async def test_an_ack_that_the_network_held_back_for_long_does_not_count(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time the ack arrives, another trainer may have the microbatch, and may have had it counted elsewhere."""
    monkeypatch.setattr(servicer, "TRAINER_ACK_SECONDS", 0.3)
    clock = ManualClock()
    async with running_chain(config, clock=clock) as chain:
        first = chain.peers[0]
        async with Proxy("127.0.0.1", int(first.record.endpoint.rpartition(":")[2])) as proxy:
            chain.router.update(Block(0), [first.record.model_copy(update={"endpoint": proxy.address})])
            reply = await chain.train(0)
            proxy.links[Direction.TO_SERVER].open.clear()
            acking = asyncio.create_task(reply.ack())
            await eventually(lambda: chain.states(0) == [None] * 3, meanwhile=lambda: clock.advance(0.5))
            proxy.resume()
            await acking
            await asyncio.sleep(0.1)
        await eventually(lambda: chain.is_idle)
        assert chain.states(0) == [None] * 3
        chain.assert_accumulated([])


async def _trained_with_a_late_backward(chain: Chain) -> None:
    """Train a microbatch for which the last stage gets no ack within half a second after its answer."""
    first, last = chain.peers[0], chain.peers[2]
    async with AsyncExitStack() as held_back:
        async with last.held():
            training = asyncio.create_task(chain.train(0))
            await eventually(lambda: len(last.stage.ledger) == 1)
            await held_back.enter_async_context(first.held())
        await eventually(lambda: last.stage.answers.num_unacknowledged == 1)
        await asyncio.sleep(0.5)
    await chain.ack(await training)
    await eventually(lambda: last.stage.answers.num_unacknowledged == 0)


async def test_a_deep_stage_waits_for_an_ack_as_long_as_the_way_back_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deep stage hears nothing of its caller while the stages before do their backward."""
    monkeypatch.setattr(servicer, "ACK_SECONDS", 0.2)
    monkeypatch.setattr(servicer, "WAY_BACK", 1e9)
    async with running_chain(SYNCHRONOUS) as chain:
        await _trained_with_a_late_backward(chain)
        chain.assert_accumulated([0])
        assert chain.states(0) == [EntryState.COMMITTED] * 3


async def test_a_caller_that_says_nothing_for_long_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may be frozen for good."""
    monkeypatch.setattr(servicer, "ACK_SECONDS", 0.2)
    monkeypatch.setattr(servicer, "LONGEST_ACK_SECONDS", 0.2)
    clock = ManualClock()
    async with running_chain(SYNCHRONOUS, clock=clock) as chain:
        await _trained_with_a_late_backward(chain)
        await eventually(lambda: chain.states(0)[2] is None, meanwhile=lambda: clock.advance(1.0))


@ANY_HOP
async def test_batches_of_which_gradients_were_taken_out_are_filled_again() -> None:
    """A late gradient has already begun the next batch. The two incomplete batches together would fill one, but neither
    is enough for a step."""
    clock = ManualClock()
    config = dataclasses.replace(DILOCO, rounds=dataclasses.replace(DILOCO.rounds, inner_batch_samples=4))
    async with running_chain(config, num_peers=(1, 2, 2), clock=clock) as chain:
        first, slow = chain.peers[:2]
        slow_way, fast_way = ([peer.record for peer in [first, *chain.peers[n::2]]] for n in (1, 2))
        chain.update(fast_way)
        await chain.train_all([0, 1])
        assert first.weights.round.stepped.samples == 4
        chain.update(slow_way)
        async with slow.held():
            late = asyncio.create_task(chain.train(2))
            await eventually(lambda: slow.stage.admission.num_admitted == 1)
            clock.advance(2.0)
            chain.update(fast_way)
            await chain.train_all([3])
            given_up = await chain.train(4)
            chain.update(slow_way)
        await chain.ack(await late)
        given_up.close()
        await eventually(
            lambda: first.weights.buckets.num_samples == 4, meanwhile=lambda: clock.advance(ORPHAN_SECONDS)
        )
        assert (chain.states(4)[0], first.weights.round.stepped.samples) == (None, 4)
        await chain.train_all([5, 6])
        assert first.weights.round.stepped.samples == 12


def _lack_memory(peer: Peer) -> None:
    """Let a peer find out that it has memory for one microbatch at a time."""
    slot = peer.stage.admission.admit(Microbatch(index=9, round=0, num_samples=2))
    peer.stage.admission.ran_out_of_memory(MemoryError(), slot)
    peer.stage.admission.leave(slot)


@ANY_HOP
async def test_a_retry_for_whose_ack_all_others_wait_needs_no_free_slot() -> None:
    """A peer of stage 0 lost its caller, and the retry adopts what the stages hold. At the last stage, which has memory
    for one at a time, the only slot belongs to a microbatch that waits for a step. That step waits for the ack which
    the retry will bring."""
    config = dataclasses.replace(DILOCO, rounds=dataclasses.replace(DILOCO.rounds, inner_batch_samples=2))
    async with running_chain(config, num_peers=(2, 2, 1), clock=ManualClock(), max_in_flight=(16, 16, 1)) as chain:
        last = chain.at(2)[0]
        _lack_memory(last)
        one_way, other_way = ([peer.record for peer in [*chain.peers[n:4:2], last]] for n in (0, 1))
        chain.update(one_way)
        (await chain.train(0)).close()
        await eventually(lambda: chain.peers[0].stage.admission.num_admitted == 0)
        chain.update(other_way)
        following = asyncio.create_task(chain.train(1))
        await eventually(lambda: last.stage.setting.num_waiting == 1)
        chain.update(one_way)
        retry = await chain.train(0)
        assert chain.states(0) == [EntryState.TENTATIVE, None, EntryState.TENTATIVE, None, EntryState.TENTATIVE]
        assert last.stage.admission.num_admitted == 1, "the retry has given its slot back"
        await chain.ack(retry)
        await chain.ack(await following)
        assert [peer.weights.round.stepped.samples for peer in chain.peers] == [2, 2, 2, 2, 4]
        assert chain.counts("rolled_back") == [0] * 5
        await eventually(lambda: chain.is_idle)


async def test_a_frozen_caller_holds_up_no_peer_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inner step waits for the acknowledgement of every microbatch in it."""
    monkeypatch.setattr(support, "SERVER_OPTIONS", server_options(50, 200))
    clock = ManualClock()
    async with running_chain(DILOCO, clock=clock) as chain:
        first, middle, _ = chain.peers
        async with Proxy("127.0.0.1", int(middle.record.endpoint.rpartition(":")[2])) as proxy:
            first.router.update(Block(1), [middle.record.model_copy(update={"endpoint": proxy.address})])
            reply = await chain.train(0)
            assert chain.states(0) == [EntryState.TENTATIVE] * 3
            proxy.stall()
            await eventually(lambda: chain.states(0)[1:] == [None] * 2, meanwhile=lambda: clock.advance(0.5))
            reply.close()
        await eventually(lambda: chain.is_idle, meanwhile=lambda: clock.advance(0.5))
