"""The end of a round at one stage: what is in its sum, and how it treats microbatches of other rounds."""

import asyncio

import pytest

from swarm.config import RunConfig
from swarm.errors import StaleMicrobatch
from swarm.stage.context import StageLimits
from swarm.stage.ledger import EntryState
from tests.support.chain import BOTH, SYNCHRONOUS, assert_close, eventually, reference, running_chain
from tests.support.chain_rounds import begin_next_round


async def test_before_a_round_closes_doubles_and_the_unacknowledged_are_taken_out() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        middle = chain.peers[1]
        await chain.train_all([0, 1])
        reply = await chain.train(2)
        await middle.runtime.control(middle.weights.close)
        await middle.stage.seal(frozenset([1]))
        assert middle.stage.ledger.committed(0) == {0}
        assert (middle.weights.buckets.open().num_samples, middle.num_idle) == (2, (0, 0, 0, 0))
        await chain.ack(reply)
        assert chain.states(2)[:2] == [EntryState.COMMITTED, None]
        await middle.runtime.control(middle.weights.reopen)
        await chain.train_all([1, 2], accumulate_only_at=1)
        assert middle.stage.ledger.committed(0) == {0, 1, 2}


async def test_what_is_being_undone_is_out_of_the_sum_before_a_round_closes() -> None:
    """This holds although the ledger no longer knows the microbatch."""
    async with running_chain(SYNCHRONOUS) as chain:
        middle = chain.peers[1]
        await chain.train_all([0, 1])
        await chain.train(2)
        entry = middle.stage.ledger.find(2)
        assert entry is not None
        assert entry.computation is not None
        middle.stage.endings.discard(entry.computation)
        await middle.stage.seal(frozenset())
        assert middle.weights.buckets.open().num_samples == 4


async def test_a_closed_round_admits_nothing_until_it_is_reopened() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        first = chain.peers[0]
        await first.runtime.control(first.weights.close)
        training = asyncio.create_task(chain.train_all([0]))
        await eventually(lambda: first.stage.counters["busy_replies"] > 1)
        assert chain.num_samples() == [0, 0, 0]
        await first.runtime.control(first.weights.reopen)
        await training
        chain.assert_accumulated([0])


async def test_microbatches_of_the_round_before_the_last_are_stale() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        await begin_next_round([chain.peers[0]])
        await begin_next_round([chain.peers[0]])
        with pytest.raises(StaleMicrobatch, match="round 0 has committed"):
            await chain.train(0)
        assert chain.counts("forwards") == [0, 0, 0]


@pytest.mark.parametrize("falls_behind", ["before it is asked", "while they wait"])
async def test_what_is_ahead_of_a_peer_that_catches_up_goes_to_another(falls_behind: str) -> None:
    """The peer has nothing to do, but whatever it took would have to wait for its download."""
    async with running_chain(SYNCHRONOUS, num_peers=(1, 2, 1)) as chain:
        behind, other = chain.at(1)
        is_behind = falls_behind == "before it is asked"
        behind.stage.present_round.is_behind = is_behind
        await begin_next_round([peer for peer in chain.peers if peer is not behind])
        if not is_behind:
            other.stage.admission.close()
        training = asyncio.create_task(chain.train_all([8, 9], round_number=1))
        if not is_behind:
            await eventually(lambda: behind.stage.admission.num_admitted == 2)
        behind.stage.present_round.is_behind = True
        other.stage.admission.open()
        async with asyncio.timeout(StageLimits.round_wait_seconds / 2):
            await training
        assert [peer.stage.counters["forwards"] for peer in (behind, other)] == [0, 2]


@pytest.mark.parametrize("late", [0, 1, 2])
async def test_a_stage_that_has_to_repeat_a_round_gets_it_with_that_rounds_weights(late: int) -> None:
    """The stage lost all its peers and came back from a checkpoint, when the others had committed already."""
    async with running_chain(SYNCHRONOUS, max_in_flight=(2, 2, 2)) as chain:
        await begin_next_round([peer for peer in chain.peers if peer.backend.stage != late])
        # Microbatches that wait for the late stage take no slots from those that this stage needs.
        ahead = [asyncio.create_task(chain.train(index, round_number=1)) for index in (8, 9)]
        if late > 0:
            await eventually(lambda: chain.peers[late].stage.admission.num_admitted == 2)
        await chain.train_all([0, 1], accumulate_only_at=late)
        # A microbatch of the late stage's own round counts there, and nowhere else.
        await chain.train_all([2])
        expected = reference(SYNCHRONOUS, [0, 1, 2])[1]
        sums = chain.peers[late].weights.buckets.open().sums
        assert_close(sums, {name: expected[name] for name in sums}, 1e-5)
        assert chain.num_samples() == [6 if stage == late else 0 for stage in range(3)]
        await begin_next_round([chain.peers[late]])
        for reply in await asyncio.gather(*ahead):
            await chain.ack(reply)
        assert chain.num_samples() == [4, 4, 4]
        await eventually(lambda: chain.is_idle)


@BOTH
async def test_before_another_state_is_installed_everything_is_forgotten(config: RunConfig) -> None:
    async with running_chain(config) as chain:
        first = chain.peers[0]
        await chain.train_all([0])
        async with chain.peers[2].held():
            training = asyncio.create_task(chain.train(1))
            await eventually(lambda: len(chain.peers[2].stage.ledger) == 2)
            training.cancel()
            async with first.stage.changing_state():
                assert len(first.stage.ledger) == 0
            assert first.weights.buckets.open().num_tentative == first.weights.version.users == 0
