"""A microbatch counts at most once at a stage, whatever is repeated, lost, or dies."""

import asyncio
import dataclasses
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import torch

from swarm.config import RunConfig
from swarm.errors import PeerUnavailable, StaleMicrobatch
from swarm.rpc.stream import Stream
from swarm.stage import servicer
from swarm.stage.context import StageLimits
from swarm.stage.ledger import EntryState
from swarm.training.round_member import Contribution
from tests.support.chain import (
    DILOCO,
    ORPHAN_SECONDS,
    SYNCHRONOUS,
    Chain,
    Peer,
    assert_close,
    eventually,
    reference,
    running_chain,
)
from tests.support.manual_clock import ManualClock
from tests.support.proxy import Direction, Proxy

_BOTH = pytest.mark.parametrize("config", [SYNCHRONOUS, DILOCO], ids=["synchronous", "diloco"])


def _states(chain: Chain, microbatch: int) -> list[EntryState | None]:
    entries = [peer.stage.ledger.find(microbatch) for peer in chain.peers]
    return [None if entry is None else entry.state for entry in entries]


def _is_idle(chain: Chain) -> bool:
    return all(peer.num_idle == (0, 0, 0, 0) for peer in chain.peers)


# -- repeats -----------------------------------------------------------------------------------------------------------


@_BOTH
async def test_a_repeat_of_a_tentative_microbatch_is_answered_and_not_counted(config: RunConfig) -> None:
    """The synchronous answer is from memory. With DiLoCo, where replicas differ, it is for the new activations."""
    async with running_chain(config) as chain:
        first, second = await chain.train(0), await chain.train(0)
        assert second.loss == pytest.approx(first.loss, abs=1e-6)
        chain.assert_accumulated([0])
        if config is SYNCHRONOUS:
            assert (chain.counts("forwards"), chain.counts("repeated")) == ([1, 1, 1], [1, 0, 0])
        else:
            assert (chain.counts("forwards"), chain.counts("repeated")) == ([2, 2, 2], [1, 1, 1])
        await chain.ack(first)
        assert _states(chain, 0) == [EntryState.TENTATIVE] * 3, "only the latest call may acknowledge"
        await chain.ack(second)
        assert _states(chain, 0) == [EntryState.COMMITTED] * 3
        assert chain.counts("committed") == [1, 1, 1]
        chain.assert_accumulated([0])
        await eventually(lambda: _is_idle(chain))


@_BOTH
async def test_a_repeat_of_a_running_microbatch_takes_it_over(config: RunConfig) -> None:
    async with running_chain(config) as chain:
        async with chain.peers[2].held():
            first = asyncio.create_task(chain.train(0))
            await eventually(lambda: len(chain.peers[2].stage.ledger) == 1)
            second = asyncio.create_task(chain.train(0))
            with pytest.raises(StaleMicrobatch):
                await first
        await chain.ack(await second)
        assert _states(chain, 0) == [EntryState.COMMITTED] * 3
        chain.assert_accumulated([0])
        await eventually(lambda: _is_idle(chain))


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
    """A peer of stage 0 died, say: its microbatches are run again, perhaps by other peers of later stages."""
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


@_BOTH
async def test_many_repeats_at_once_count_once(config: RunConfig) -> None:
    async with running_chain(config) as chain:

        async def impatient() -> None:
            with suppress(StaleMicrobatch):
                await chain.ack(await chain.train(0))

        await asyncio.gather(*(impatient() for _ in range(8)))
        await impatient()
        assert _states(chain, 0) == [EntryState.COMMITTED] * 3
        chain.assert_accumulated([0])
        await eventually(lambda: _is_idle(chain))


async def test_of_several_answers_one_is_acknowledged_and_the_others_take_nothing_back() -> None:
    """With DiLoCo the answers share one accumulated gradient."""
    clock = ManualClock()
    async with running_chain(DILOCO, clock=clock) as chain:
        replies = [await chain.train(0) for _ in range(3)]
        await chain.ack(replies[1])
        assert _states(chain, 0) == [EntryState.COMMITTED] * 3
        for reply in replies:
            reply.close()
        await eventually(lambda: _is_idle(chain), meanwhile=lambda: clock.advance(0.5))
        clock.advance(10 * ORPHAN_SECONDS)
        await asyncio.sleep(0.05)
        assert _states(chain, 0) == [EntryState.COMMITTED] * 3
        chain.assert_accumulated([0])


# -- answers that nobody acknowledges ----------------------------------------------------------------------------------


@_BOTH
async def test_an_answer_that_nobody_acknowledges_is_rolled_back_at_every_stage(config: RunConfig) -> None:
    clock = ManualClock()
    async with running_chain(config, clock=clock) as chain:
        await chain.train_all([1])
        reply = await chain.train(0)
        reply.close()
        await eventually(lambda: chain.peers[0].stage.admission.num_admitted == 0)
        clock.advance(ORPHAN_SECONDS - 0.1)
        await asyncio.sleep(0.05)
        assert _states(chain, 0) == [EntryState.TENTATIVE] * 3, "a retry may still come"
        await eventually(lambda: _states(chain, 0) == [None] * 3, meanwhile=lambda: clock.advance(0.5))
        # The gradient is forgotten at once, and taken out when the compute threads come to it.
        await eventually(lambda: _is_idle(chain))
        chain.assert_accumulated([1])
        assert chain.counts("rolled_back") == [1, 1, 1]
        await chain.train_all([0])
        chain.assert_accumulated([0, 1])


@_BOTH
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
        assert _states(chain, 0) == [EntryState.COMMITTED] * 3
        assert chain.counts("rolled_back") == [0, 0, 0]
        chain.assert_accumulated([0])
        await eventually(lambda: _is_idle(chain))


@_BOTH
async def test_a_trainer_that_dies_in_mid_microbatch_leaves_nothing(config: RunConfig) -> None:
    clock = ManualClock()
    async with running_chain(config, clock=clock) as chain:
        async with chain.peers[2].held():
            training = asyncio.create_task(chain.train(0))
            await eventually(lambda: len(chain.peers[2].stage.ledger) == 1)
            training.cancel()
            await eventually(lambda: chain.peers[0].stage.admission.num_admitted == 0)
        await eventually(lambda: _states(chain, 0) == [None] * 3, meanwhile=lambda: clock.advance(0.5))
        await eventually(lambda: _is_idle(chain))
        chain.assert_accumulated([])
        await eventually(lambda: _is_idle(chain))


@_BOTH
async def test_a_cancellation_that_is_answered_with_a_broken_connection_is_still_one(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC answers so if the connection breaks at that very moment."""
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
        await eventually(lambda: _states(chain, 0) == [None] * 4, meanwhile=lambda: clock.advance(0.5))
        await eventually(lambda: _is_idle(chain))
        assert sum(chain.counts("forwards")[:3]) == 2, "nobody else is asked"
        chain.assert_accumulated([])


@_BOTH
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
            await eventually(lambda: _states(chain, 0) == [None, waits, waits])
        await eventually(lambda: _states(chain, 0) == [None] * 3, meanwhile=lambda: clock.advance(0.5))
        await eventually(lambda: _is_idle(chain))
        # The last stage had begun. It goes on if a stage waits for it that may yet be asked again.
        computed = [0, 0, int(config.rounds.synchronous)]
        assert (chain.counts("backwards"), chain.counts("rolled_back")) == (computed, computed)
        chain.assert_accumulated([])


async def test_a_lost_ack_ends_in_missing_and_a_replay_mends_it() -> None:
    """An ack is lost between the first stage and the second. So the microbatch counts only before that place."""
    clock = ManualClock()
    async with running_chain(SYNCHRONOUS, clock=clock) as chain:
        first, middle, _ = chain.peers
        async with Proxy("127.0.0.1", int(middle.record.endpoint.rpartition(":")[2])) as proxy:
            first.router.update(1, [middle.record.model_copy(update={"endpoint": proxy.address})])
            reply = await chain.train(0)
            proxy.refuse()
            proxy.cut()
            await chain.ack(reply)
        first.router.update(1, [middle.record])
        await eventually(
            lambda: _states(chain, 0) == [EntryState.COMMITTED, None, None], meanwhile=lambda: clock.advance(0.5)
        )
        await eventually(lambda: chain.num_samples() == [2, 0, 0])
        await chain.train_all([0], accumulate_only_at=1)
        await chain.train_all([0], accumulate_only_at=2)
        chain.assert_accumulated([0])
        await eventually(lambda: _is_idle(chain))


@_BOTH
async def test_an_ack_that_the_network_held_back_for_long_does_not_count(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time the ack arrives, another trainer may have the microbatch, and may have had it counted elsewhere."""
    monkeypatch.setattr(servicer, "TRAINER_ACK_SECONDS", 1.0)
    clock = ManualClock()
    async with running_chain(config, clock=clock) as chain:
        first = chain.peers[0]
        async with Proxy("127.0.0.1", int(first.record.endpoint.rpartition(":")[2])) as proxy:
            chain.router.update(0, [first.record.model_copy(update={"endpoint": proxy.address})])
            reply = await chain.train(0)
            proxy.links[Direction.TO_SERVER].open.clear()
            acking = asyncio.create_task(reply.ack())
            await eventually(lambda: _states(chain, 0) == [None] * 3, meanwhile=lambda: clock.advance(0.5))
            proxy.resume()
            await acking
            await asyncio.sleep(0.1)
        await eventually(lambda: _is_idle(chain))
        assert _states(chain, 0) == [None] * 3
        chain.assert_accumulated([])


async def _trained_with_a_late_backward(chain: Chain) -> None:
    """Train a microbatch of which the last stage hears nothing for half a second after its answer."""
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
        assert _states(chain, 0) == [EntryState.COMMITTED] * 3


async def test_a_caller_that_says_nothing_for_long_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may be frozen for good."""
    monkeypatch.setattr(servicer, "ACK_SECONDS", 0.2)
    monkeypatch.setattr(servicer, "LONGEST_ACK_SECONDS", 0.2)
    clock = ManualClock()
    async with running_chain(SYNCHRONOUS, clock=clock) as chain:
        await _trained_with_a_late_backward(chain)
        await eventually(lambda: _states(chain, 0)[2] is None, meanwhile=lambda: clock.advance(1.0))


@pytest.mark.parametrize(
    ("stage", "way_seconds", "seconds"),
    [(0, 1000.0, 7.0), (1, 0.0, 120.0), (1, -1e300, 120.0), (15, 50.0, 300.0), (15, 1e300, 3600.0)],
)
def test_seconds_that_an_ack_is_waited_for(stage: int, way_seconds: float, seconds: float) -> None:
    assert servicer.ack_seconds(stage, way_seconds) == seconds


# -- peers that die ----------------------------------------------------------------------------------------------------


def _was_asked_again(peer: Peer) -> bool:
    """Whether a retry came: a synchronous one joined, and one with DiLoCo began another computation."""
    return peer.stage.counters["forwards"] + peer.stage.counters["repeated"] >= 2


async def _stop_in_mid_microbatch(chain: Chain, stage: int) -> tuple[Chain, Peer]:
    """Train microbatch 0, and stop the peer of `stage` that took it while the last stage has not computed yet.

    Gives the chain without the dead peer, and the peer that stepped in.
    """
    last = chain.at(2)[-1]
    async with last.held():
        training = asyncio.create_task(chain.train(0))
        await eventually(lambda: len(last.stage.ledger) == 1)
        (dead,) = [peer for peer in chain.at(stage) if len(peer.stage.ledger)]
        (other,) = [peer for peer in chain.at(stage) if peer is not dead]
        await dead.stop()
        await eventually(lambda: len(other.stage.ledger) == 1 and _was_asked_again(last))
    await chain.ack(await training)
    return dataclasses.replace(chain, peers=[peer for peer in chain.peers if peer is not dead]), other


@_BOTH
async def test_a_backward_is_taken_over_from_a_peer_that_died_after_its_forward(config: RunConfig) -> None:
    async with running_chain(config, num_peers=(1, 2, 1)) as chain:
        alive, other = await _stop_in_mid_microbatch(chain, 1)
        alive.assert_accumulated([0])
        assert _states(alive, 0) == [EntryState.COMMITTED] * 3
        assert alive.counts("rerouted_backwards") == [int(peer is other) for peer in alive.peers]
        assert alive.counts("committed") == [1, 1, 1]
        await eventually(lambda: _is_idle(alive))


@_BOTH
async def test_a_trainer_too_takes_its_microbatch_to_another_peer(config: RunConfig) -> None:
    async with running_chain(config, num_peers=(2, 1, 1)) as chain:
        last = chain.at(2)[0]
        async with last.held():
            training = asyncio.create_task(chain.train(0))
            await eventually(lambda: len(last.stage.ledger) == 1)
            (dead,) = [peer for peer in chain.at(0) if len(peer.stage.ledger)]
            (other,) = [peer for peer in chain.at(0) if peer is not dead]
            await dead.stop()
            await eventually(lambda: _was_asked_again(chain.at(1)[0]))
        reply = await training
        await chain.ack(reply)
        assert reply.num_reroutes == 1
        alive = dataclasses.replace(chain, peers=[peer for peer in chain.peers if peer is not dead])
        alive.assert_accumulated([0])
        assert alive.counts("rerouted_backwards") == [int(peer is other) for peer in alive.peers]
        await eventually(lambda: _is_idle(alive))


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
        await eventually(lambda: _is_idle(alive))


# -- the end of a synchronous round ------------------------------------------------------------------------------------


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
        assert _states(chain, 2)[:2] == [EntryState.COMMITTED, None]
        await middle.runtime.control(middle.weights.reopen)
        await chain.train_all([1, 2], accumulate_only_at=1)
        assert middle.stage.ledger.committed(0) == {0, 1, 2}


async def test_what_is_being_undone_is_out_of_the_sum_before_a_round_closes() -> None:
    """It is so although the ledger has forgotten it."""
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


def _assert_mean(contribution: Contribution, microbatches: list[int]) -> None:
    assert contribution.committed == set(microbatches)
    assert contribution.num_samples == 2 * len(microbatches)
    expected = reference(SYNCHRONOUS, microbatches)[1]
    mean = {name: expected[name] / contribution.num_targets for name in contribution.tensors}
    assert_close(contribution.tensors, mean, 1e-5)


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


async def _commit(peer: Peer) -> None:
    """End a peer's round with a gradient of ones."""

    def commit() -> None:
        ones = {name: torch.ones_like(value) for name, value in peer.weights.close().tensors.items()}
        peer.weights.commit(ones, total_squared_norm=1.0, num_samples=16, num_members=1, lineage="")

    await peer.runtime.control(commit)
    peer.stage.round_began()


async def test_microbatches_of_the_round_before_the_last_are_stale() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        await _commit(chain.peers[0])
        await _commit(chain.peers[0])
        with pytest.raises(StaleMicrobatch, match="round 0 has committed"):
            await chain.train(0)
        assert chain.counts("forwards") == [0, 0, 0]


@pytest.mark.parametrize("falls_behind", ["before it is asked", "while they wait"])
async def test_what_is_ahead_of_a_peer_that_catches_up_goes_to_another(falls_behind: str) -> None:
    """The peer has nothing to do, but all that it took would wait for its download."""
    async with running_chain(SYNCHRONOUS, num_peers=(1, 2, 1)) as chain:
        behind, other = chain.at(1)
        is_behind = falls_behind == "before it is asked"
        behind.stage.present_round.is_behind = is_behind
        for peer in chain.peers:
            if peer is not behind:
                await _commit(peer)
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
        for peer in chain.peers:
            if peer.backend.stage != late:
                await _commit(peer)
        # Microbatches that wait for the late stage take no place from those that this stage needs.
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
        await _commit(chain.peers[late])
        for reply in await asyncio.gather(*ahead):
            await chain.ack(reply)
        assert chain.num_samples() == [4, 4, 4]
        await eventually(lambda: _is_idle(chain))


@_BOTH
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


async def test_batches_of_which_gradients_were_taken_out_are_filled_again() -> None:
    """A late gradient has begun the next batch meanwhile. Together both would fill one; no step can use either
    alone."""
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
            lambda: first.weights.num_unstepped_samples == 4, meanwhile=lambda: clock.advance(ORPHAN_SECONDS)
        )
        assert (_states(chain, 4)[0], first.weights.round.stepped.samples) == (None, 4)
        await chain.train_all([5, 6])
        assert first.weights.round.stepped.samples == 12
