"""Busy peers: a microbatch that they refuse goes to another peer or is tried again, and no peer is banned for it."""

import asyncio
import dataclasses
from functools import partial

import pytest

from swarm.config import RoundsConfig
from swarm.errors import Overloaded
from swarm.routing.throughput import Observation
from swarm.stage import servicer
from swarm.stage.admission import FEW
from swarm.stage.runtime import Runtime
from swarm.training.samples import Microbatch
from swarm.types import Block
from tests.support.chain import (
    ANY_HOP,
    DILOCO,
    SYNCHRONOUS,
    Peer,
    eventually,
    failures_of,
    running_chain,
)
from tests.support.commits import end_round
from tests.support.manual_clock import ManualClock


@pytest.mark.parametrize(("round_samples", "part"), [(4, 1), (8, 2), (10, 3)])
async def test_a_peer_with_its_part_of_a_round_in_flight_leaves_others_the_rest(round_samples: int, part: int) -> None:
    """There are two members, so its part is half of the microbatches, of two samples each."""
    rounds = RoundsConfig(setting="synchronous", round_samples=round_samples)
    async with running_chain(dataclasses.replace(SYNCHRONOUS, rounds=rounds)) as chain:
        peer = chain.peers[0]
        average = await peer.runtime.control(peer.weights.contribute)
        amounts = {"num_samples": round_samples, "num_members": 2}
        await peer.runtime.control(partial(end_round, peer.weights, average.tensors, **amounts))
        microbatch = Microbatch(index=round_samples // 2, round=1, num_samples=2)
        admission = peer.stage.admission
        slots = [admission.admit(microbatch, has_others=True) for _ in range(part)]
        with pytest.raises(Overloaded, match="its part"):
            admission.admit(microbatch, has_others=True)
        admission.leave(slots.pop())
        slots.append(admission.admit(microbatch, has_others=True))
        for slot in (*slots, admission.admit(microbatch)):
            admission.leave(slot)


@ANY_HOP
@pytest.mark.parametrize("full", [0, 1])
async def test_busy_is_waited_out_and_bans_nobody(full: int) -> None:
    """At the first stage the trainer waits. At a later stage the stage before waits."""
    max_in_flight = [2 if stage == full else 16 for stage in range(3)]
    async with running_chain(SYNCHRONOUS, max_in_flight=max_in_flight) as chain:
        failures = failures_of(chain.router, chain.peers[0].router)
        async with chain.peers[2].held():
            training = asyncio.create_task(chain.train_all(range(6)))
            await eventually(lambda: chain.counts("busy_replies")[full] > 3)
        await training
        chain.assert_accumulated(range(6))
        chain.assert_idle()
        assert failures == []


def _let_work_wait(monkeypatch: pytest.MonkeyPatch, *peers: Peer) -> None:
    """Let these peers report that some tasks wait for their compute threads."""

    class BusyRuntime(Runtime):
        @property
        def queue_length(self) -> int:
            return FEW

    for peer in peers:
        monkeypatch.setattr(peer.runtime, "__class__", BusyRuntime)


async def test_a_microbatch_goes_where_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(4, 1, 1)) as chain:
        busy, *others = chain.at(0)
        _let_work_wait(monkeypatch, busy)
        failures = failures_of(chain.router)
        for index in range(6):
            reply = await chain.train(index)
            assert reply.num_busy == 0, "the window is not to shrink for it"
            await chain.ack(reply)
        assert busy.stage.counters["committed"] == 0
        assert busy.stage.counters["busy_replies"] > 0
        assert sum(peer.stage.counters["committed"] for peer in others) == 6
        assert not chain.trainer.is_held_up
        assert failures == []
        chain.assert_accumulated(range(6))


@ANY_HOP
async def test_busy_against_a_credit_bans_nobody() -> None:
    """A credit promises nothing: when it is used, another caller may already have taken the slot."""
    async with running_chain(SYNCHRONOUS, max_in_flight=(1, 1, 1)) as chain:
        await chain.train_all([0])
        failures = failures_of(chain.router)
        async with chain.another_trainer() as other:
            async with chain.peers[2].held():
                theirs = asyncio.create_task(chain.train(1, hop=other))
                await eventually(lambda: chain.peers[0].stage.admission.num_admitted == 1)
                ours = asyncio.create_task(chain.train_all([2]))
                await eventually(lambda: chain.counts("busy_replies")[0] > 0)
            await chain.ack(await theirs)
            await ours
        chain.assert_accumulated([0, 1, 2])
        assert failures == []


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send signs of life all the time."""
    monkeypatch.setattr(servicer, "PROGRESS_SECONDS", 0.01)


@pytest.mark.usefixtures("talkative")
async def test_a_slow_peer_with_a_full_queue_is_not_taken_for_stalled() -> None:
    clock = ManualClock()
    async with running_chain(DILOCO, hop_clock=clock) as chain:
        first = chain.peers[0]
        chain.router.succeeded(
            Block(0), first.peer_id, Observation(num_samples=2, busy_seconds=10.0, link_seconds=None, queue_length=17)
        )
        async with first.held():
            training = asyncio.create_task(chain.train(0))
            await eventually(lambda: len(first.stage.ledger) == 1)
            clock.advance(18 * 10.0)
            await asyncio.sleep(0.2)
        reply = await training
        assert reply.num_reroutes == 0
        await chain.ack(reply)


@ANY_HOP
@pytest.mark.usefixtures("talkative")
async def test_who_stalls_alone_is_asked_again_and_given_longer() -> None:
    """The peer has answered no call yet, so it may simply be slow."""
    clock = ManualClock()
    async with running_chain(DILOCO, hop_clock=clock) as chain:
        first = chain.peers[0]
        async with first.held():
            training = asyncio.create_task(chain.train(0))
            await eventually(lambda: len(first.stage.ledger) == 1)
            clock.advance(121.0)
            await eventually(lambda: first.stage.admission.num_admitted == 0)
            await eventually(lambda: first.stage.admission.num_admitted == 1, meanwhile=lambda: clock.advance(0.01))
            clock.advance(200.0)
            await asyncio.sleep(0.2)
        reply = await training
        assert reply.num_reroutes == 1
        await chain.ack(reply)


@ANY_HOP
async def test_a_leaving_peer_is_left_alone_and_not_banned() -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(1, 2, 1)) as chain:
        leaving, staying = chain.at(1)
        leaving.stage.admission.close()
        await chain.train_all(range(4))
        assert (leaving.stage.counters["forwards"], staying.stage.counters["forwards"]) == (0, 4)
        assert chain.peers[0].router.banned(Block(1)) == set()
