"""A microbatch counts at most once at a stage, whatever is repeated, lost, or dies."""

import asyncio
import dataclasses
from contextlib import suppress

import pytest

from swarm.config import RunConfig
from swarm.errors import StaleMicrobatch
from swarm.stage.ledger import EntryState
from tests.support.chain import ANY_HOP, BOTH, DILOCO, ORPHAN_SECONDS, SYNCHRONOUS, Peer, eventually, running_chain
from tests.support.manual_clock import ManualClock

pytestmark = ANY_HOP

# -- repeats -----------------------------------------------------------------------------------------------------------


@BOTH
async def test_a_repeat_of_a_tentative_microbatch_is_answered_and_not_counted(config: RunConfig) -> None:
    """In the synchronous setting the former answer is repeated. With DiLoCo, where replicas differ, the answer is
    computed for the new activations."""
    async with running_chain(config) as chain:
        first, second = await chain.train(0), await chain.train(0)
        assert second.loss == pytest.approx(first.loss, abs=1e-6)
        chain.assert_accumulated([0])
        if config is SYNCHRONOUS:
            assert (chain.counts("forwards"), chain.counts("repeated")) == ([1, 1, 1], [1, 0, 0])
        else:
            assert (chain.counts("forwards"), chain.counts("repeated")) == ([2, 2, 2], [1, 1, 1])
        await chain.ack(first)
        assert chain.states(0) == [EntryState.TENTATIVE] * 3, "only the latest call may acknowledge"
        await chain.ack(second)
        assert chain.states(0) == [EntryState.COMMITTED] * 3
        assert chain.counts("committed") == [1, 1, 1]
        chain.assert_accumulated([0])
        await eventually(lambda: chain.is_idle)


@BOTH
async def test_a_repeat_of_a_running_microbatch_takes_it_over(config: RunConfig) -> None:
    async with running_chain(config) as chain:
        async with chain.peers[2].held():
            first = asyncio.create_task(chain.train(0))
            await eventually(lambda: len(chain.peers[2].stage.ledger) == 1)
            second = asyncio.create_task(chain.train(0))
            with pytest.raises(StaleMicrobatch):
                await first
        await chain.ack(await second)
        assert chain.states(0) == [EntryState.COMMITTED] * 3
        chain.assert_accumulated([0])
        await eventually(lambda: chain.is_idle)


async def test_with_diloco_a_repeat_of_a_committed_microbatch_is_computed_and_not_counted() -> None:
    async with running_chain(DILOCO) as chain:
        losses = await chain.train_all([0, 1])
        assert await chain.train_all([0, 1]) == pytest.approx(losses, abs=1e-6)
        assert chain.counts("committed") == [2, 2, 2]
        chain.assert_accumulated([0, 1])
        chain.assert_idle()


async def test_a_repeat_of_what_counts_at_stage_0_is_refused() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        await chain.train_all([0])
        with pytest.raises(StaleMicrobatch, match="counts already"):
            await chain.train(0)
        assert chain.counts("forwards") == [1, 1, 1]
        chain.assert_accumulated([0])
        chain.assert_idle()


async def test_what_counts_at_a_stage_is_not_accumulated_elsewhere_behind_it() -> None:
    """For example, a peer of stage 0 died. Its microbatches are run again, perhaps by other peers of later stages."""
    microbatches = range(6)
    async with running_chain(SYNCHRONOUS, num_peers=(2, 1, 2)) as chain:
        await chain.train_all([*microbatches])
        dead, other = chain.at(0)
        await dead.stop()
        lost = [m for m in microbatches if dead.stage.ledger.find(m) is not None]
        assert lost, "the peers of a stage share its work"
        for microbatch in lost:
            await chain.ack(await chain.train(microbatch))
        holders = {m: [peer for peer in chain.at(2) if peer.stage.ledger.find(m) is not None] for m in microbatches}
        assert all(len(peers) == 1 for peers in holders.values())
        alive = dataclasses.replace(chain, peers=[peer for peer in chain.peers if peer is not dead])
        alive.assert_accumulated([*microbatches])
        assert sorted(other.stage.ledger.committed(0)) == [*microbatches]


@BOTH
async def test_many_repeats_at_once_count_once(config: RunConfig) -> None:
    async with running_chain(config) as chain:

        async def impatient() -> None:
            with suppress(StaleMicrobatch):
                await chain.ack(await chain.train(0))

        await asyncio.gather(*(impatient() for _ in range(8)))
        await impatient()
        assert chain.states(0) == [EntryState.COMMITTED] * 3
        chain.assert_accumulated([0])
        await eventually(lambda: chain.is_idle)


async def test_of_several_answers_one_is_acknowledged_and_the_others_take_nothing_back() -> None:
    """With DiLoCo the answers share one accumulated gradient."""
    clock = ManualClock()
    async with running_chain(DILOCO, clock=clock) as chain:
        replies = [await chain.train(0) for _ in range(3)]
        await chain.ack(replies[1])
        assert chain.states(0) == [EntryState.COMMITTED] * 3
        for reply in replies:
            reply.close()
        await eventually(lambda: chain.is_idle, meanwhile=lambda: clock.advance(0.5))
        clock.advance(10 * ORPHAN_SECONDS)
        await asyncio.sleep(0.05)
        assert chain.states(0) == [EntryState.COMMITTED] * 3
        chain.assert_accumulated([0])


# -- peers that die ----------------------------------------------------------------------------------------------------


def _was_asked_again(peer: Peer) -> bool:
    """Whether a retry came. In the synchronous setting it joins the computation; with DiLoCo it begins another one."""
    return peer.stage.counters["forwards"] + peer.stage.counters["repeated"] >= 2


@BOTH
@pytest.mark.parametrize("stage", [0, 1])
async def test_a_backward_is_taken_over_from_a_peer_that_died_after_its_forward(config: RunConfig, stage: int) -> None:
    """From a peer of stage 0 the trainer takes its microbatch to another one."""
    async with running_chain(config, num_peers=[2 if each == stage else 1 for each in range(3)]) as chain:
        last = chain.at(2)[0]
        async with last.held():
            training = asyncio.create_task(chain.train(0))
            await eventually(lambda: len(last.stage.ledger) == 1)
            (dead,) = [peer for peer in chain.at(stage) if len(peer.stage.ledger)]
            (other,) = [peer for peer in chain.at(stage) if peer is not dead]
            await dead.stop()
            await eventually(lambda: _was_asked_again(chain.at(stage + 1)[0]))
        reply = await training
        await chain.ack(reply)
        alive = dataclasses.replace(chain, peers=[peer for peer in chain.peers if peer is not dead])
        alive.assert_accumulated([0])
        assert alive.states(0) == [EntryState.COMMITTED] * 3
        assert reply.num_reroutes == 1
        assert alive.counts("rerouted_backwards") == [int(peer is other) for peer in alive.peers]
        assert alive.counts("committed") == [1, 1, 1]
        await eventually(lambda: alive.is_idle)


async def test_the_last_stage_dies_and_another_peer_computes_the_loss() -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(1, 1, 2)) as chain:
        held = chain.at(2)
        async with held[0].held(), held[1].held():
            training = asyncio.create_task(chain.train(0))
            await eventually(lambda: any(len(peer.stage.ledger) for peer in held))
            (dead,) = [peer for peer in held if len(peer.stage.ledger)]
            await dead.stop()
        await chain.ack(await training)
        alive = dataclasses.replace(chain, peers=[peer for peer in chain.peers if peer is not dead])
        alive.assert_accumulated([0])
        await eventually(lambda: alive.is_idle)
