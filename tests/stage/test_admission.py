"""Busy peers: a microbatch that they refuse goes to another peer or is tried again, and no peer is banned for it."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from swarm.config import RoundsConfig
from swarm.errors import NotReady, Overloaded
from swarm.machine.clock import SystemClock
from swarm.routing.throughput import Observation
from swarm.stage import servicer
from swarm.stage.admission import FEW, TRIES, Shortage
from swarm.stage.boundary import TOKENS
from swarm.stage.graphs import GraphBudget
from swarm.stage.runtime import Runtime
from swarm.training.samples import Microbatch
from swarm.types import Block
from tests.support.chain import (
    ANY_HOP,
    DILOCO,
    GRAPH_BYTES,
    SYNCHRONOUS,
    Chain,
    Peer,
    eventually,
    failures_of,
    running_chain,
    tokens,
)
from tests.support.commits import end_round
from tests.support.manual_clock import ManualClock


@pytest.mark.parametrize(("round_samples", "part"), [(4, 1), (8, 2), (10, 3)])
async def test_a_peer_with_its_part_of_a_round_in_flight_leaves_others_the_rest(round_samples: int, part: int) -> None:
    """There are two members, so its part is half of the microbatches, of two samples each."""
    rounds = RoundsConfig(setting="synchronous", round_samples=round_samples)
    async with running_chain(dataclasses.replace(SYNCHRONOUS, rounds=rounds)) as chain:
        peer = chain.peers[0]
        average = await peer.runtime.control(peer.weights.close)
        await peer.runtime.control(partial(end_round, peer.weights, average.tensors, num_members=2))
        microbatch = Microbatch(index=round_samples // 2, round=1, num_samples=2)
        admission = peer.stage.admission
        slots = [admission.admit(microbatch, has_others=True) for _ in range(part)]
        with pytest.raises(Overloaded, match="its part"):
            admission.admit(microbatch, has_others=True)
        admission.leave(slots.pop())
        slots.append(admission.admit(microbatch, has_others=True))
        for slot in (*slots, admission.admit(microbatch)):
            admission.leave(slot)


async def test_a_microbatch_that_others_wait_for_gets_one_slot_more_at_a_time() -> None:
    async with running_chain(DILOCO, max_in_flight=(16, 16, 1)) as chain:
        admission = chain.peers[2].stage.admission
        reply = await chain.train(0)
        known, other = (Microbatch(index=index, round=0, num_samples=2) for index in (0, 1))
        slots = [admission.admit(other), admission.admit(known)]
        for refused in (known, other):
            with pytest.raises(Overloaded):
                admission.admit(refused)
        admission.leave(slots.pop())
        slots.append(admission.admit(known))
        for slot in slots:
            admission.leave(slot)
        await chain.ack(reply)
        admission.leave(admission.admit(known))


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


async def test_a_peer_whose_microbatches_are_all_elsewhere_takes_on_more() -> None:
    """It never takes more than its largest number, and takes more only while the next stage refuses nothing from it."""
    async with running_chain(SYNCHRONOUS, max_in_flight=(2, 16, 16), largest_in_flight=4) as chain:
        first = chain.peers[0].stage.admission
        async with chain.peers[2].held():
            training = asyncio.create_task(chain.train_all(range(6)))
            await eventually(lambda: first.num_admitted == 4)
            await eventually(lambda: chain.counts("busy_replies")[0] > 3)
            assert first.num_admitted == 4
        await training
        chain.assert_accumulated(range(6))
        chain.assert_idle()


@ANY_HOP
async def test_a_peer_that_is_refused_further_on_is_held_up() -> None:
    async with running_chain(SYNCHRONOUS, max_in_flight=(16, 16, 1)) as chain:
        hop = chain.peers[1].hop
        assert not hop.is_held_up
        async with chain.peers[2].held():
            training = asyncio.create_task(chain.train_all(range(2)))
            await eventually(lambda: hop.is_held_up and chain.counts("busy_replies")[2] > 0)
            await eventually(lambda: not chain.peers[0].hop.is_held_up)  # All of its own are taken.
        await training
        await eventually(lambda: not hop.is_held_up)


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


@pytest.mark.parametrize(("num_peers", "num_sent_on"), [(1, 0), (3, 0), (4, 1), (9, 2)])
async def test_where_work_waits_everywhere_the_last_one_that_is_asked_takes_it(
    num_peers: int, num_sent_on: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are only a few peers, each sender has asked all of them, so the first one takes it."""
    async with running_chain(SYNCHRONOUS, num_peers=(num_peers, 1, 1)) as chain:
        _let_work_wait(monkeypatch, *chain.at(0))
        await chain.ack(await chain.train(0))
        assert sum(peer.stage.counters["busy_replies"] for peer in chain.at(0)) == num_sent_on
        chain.assert_accumulated([0])


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


CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes.")
GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")


def _shortage() -> Shortage:
    return Shortage(1, GraphBudget(limit_bytes=1000, graph_bytes=10))


def test_each_failure_halves_what_is_in_flight_and_the_graphs(caplog: pytest.LogCaptureFixture) -> None:
    budget = GraphBudget(limit_bytes=1000, graph_bytes=10, num_kept=6)
    shortage = Shortage(1, budget)
    for number, (in_flight, most) in enumerate([(12, 6), (6, 3), (3, 1)]):
        shortage.failed(CPU, num_reductions=number, in_flight=in_flight)
        assert shortage.most_in_flight == most
    assert budget.limit_bytes == 30
    assert "no room for 4.0 GiB" in caplog.text
    assert len(caplog.records) == 3


def test_what_was_in_flight_before_says_nothing_new() -> None:
    shortage = _shortage()
    for _ in range(8):
        shortage.failed(CPU, num_reductions=0, in_flight=8)
    assert (shortage.most_in_flight, shortage.fault) == (4, None)


def test_failures_in_a_row_at_one_microbatch_are_the_end() -> None:
    shortage = _shortage()
    shortage.failed(GPU, num_reductions=0, in_flight=1)
    for _ in range(TRIES - 1):
        shortage.failed(GPU, num_reductions=1, in_flight=1)
    shortage.succeeded()
    for _ in range(TRIES - 1):
        shortage.failed(GPU, num_reductions=1, in_flight=1)
    assert shortage.fault is None
    shortage.failed(GPU, num_reductions=1, in_flight=1)
    assert shortage.fault is not None
    said = str(shortage.fault)
    assert "stage 1 ran out of memory at 3 microbatches in a row, one at a time (no room for 4.00 GiB)" in said
    for setting in ("data.microbatch_size", "data.sequence_length", "model.gradient_checkpointing"):
        assert setting in said


# -- at a stage --------------------------------------------------------------------------------------------------------


def _fail(peer: Peer, monkeypatch: pytest.MonkeyPatch, method: str, fails: Callable[[], bool]) -> None:
    """Let a peer's backend run out of memory as long as `fails` returns true."""
    monkeypatch.setattr("swarm.stage.admission.SHORTAGE_RETRY_SECONDS", 0.01)
    real = getattr(peer.backend, method)

    def scripted(*arguments: Any, **options: Any) -> Any:
        if fails():
            raise CPU
        return real(*arguments, **options)

    monkeypatch.setattr(peer.backend, method, scripted)


async def _train_all(chain: Chain, indices: Sequence[int]) -> None:
    async with asyncio.timeout(20.0):
        await chain.train_all(indices)


@pytest.mark.parametrize(("stage", "method"), [(0, "forward"), (1, "forward"), (1, "_collect"), (2, "forward_loss")])
async def test_a_peer_that_fails_with_many_in_flight_takes_fewer_and_loses_nothing(
    stage: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_chain(SYNCHRONOUS, max_in_flight=(16, 16, 16)) as chain:
        (peer,) = chain.at(stage)
        _fail(peer, monkeypatch, method, lambda: peer.stage.admission.num_admitted > 2)
        async with peer.held():
            training = asyncio.create_task(_train_all(chain, range(8)))
            if stage == 0:
                await eventually(lambda: peer.stage.admission.num_admitted == 8)
            else:
                await eventually(lambda: peer.stage.admission.num_admitted > 2)
        await training
        assert peer.stage.admission.fault is None
        assert peer.backend.budget.limit_bytes < GRAPH_BYTES, "half as many as there were"
        chain.assert_accumulated(range(8))
        await eventually(lambda: all(peer.stage.admission.num_admitted == 0 for peer in chain.peers))
        chain.assert_idle()


class Ahead(SystemClock):
    """A clock that a test moves forward."""

    seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.seconds


@ANY_HOP
async def test_a_peer_that_fails_at_every_microbatch_gives_up_and_another_does_its_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Ahead()
    async with running_chain(DILOCO, num_peers=(1, 2, 1), hop_clock=clock) as chain:
        broken, sound = chain.at(1)
        _fail(broken, monkeypatch, "forward", lambda: True)
        num_trained = 0
        async with asyncio.timeout(60.0):
            while broken.stage.admission.fault is None:
                await chain.train_all([num_trained])
                num_trained += 1
                clock.seconds += 1000.0  # The broken peer is banned no more.
            await broken.stage.admission.gives_up()
        assert (broken.stage.counters["committed"], sound.stage.counters["committed"]) == (0, num_trained)
        assert sum("no room for 4.0 GiB" in record.getMessage() for record in caplog.records) <= 2 * (TRIES + 1)
        with pytest.raises(NotReady, match="has no memory, and leaves"):
            broken.stage.admission.admit(Microbatch(index=1, round=0, num_samples=2))
    assert "internal error" not in caplog.text


async def test_what_exceeds_the_memory_is_told_to_come_again() -> None:
    """The bound holds for each round separately: microbatches of the next round wait, and must not block those of this
    round."""
    async with running_chain(SYNCHRONOUS) as chain:
        stage = chain.at(1)[0].stage
        microbatch = Microbatch(index=0, round=0, num_samples=2)
        slots = [stage.admission.admit(dataclasses.replace(microbatch, index=index)) for index in range(4)]
        stage.admission.ran_out_of_memory(CPU, slots[0])
        with pytest.raises(Overloaded, match="no memory for more"):
            stage.admission.admit(microbatch)
        assert stage.admission.grants(has_others=False) == 0
        following = stage.admission.admit(dataclasses.replace(microbatch, index=8, round=1))
        for slot in (*slots, following):
            stage.admission.leave(slot)
        slots = [stage.admission.admit(microbatch), stage.admission.admit(microbatch)]
        with pytest.raises(Overloaded, match="no memory for more"):
            stage.admission.admit(microbatch)
        for slot in slots:
            stage.admission.leave(slot)


async def test_an_evaluation_without_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer does not leave because of this, since training may still go on."""
    async with running_chain(DILOCO, num_peers=(2, 1, 1)) as chain:
        peer = chain.at(0)[0]
        _fail(peer, monkeypatch, "evaluate", lambda: True)
        async with asyncio.timeout(20.0):
            while not caplog.records:
                await chain.evaluate({TOKENS: tokens(DILOCO, 0)})
        assert peer.stage.admission.fault is None
        assert peer.backend.budget.limit_bytes == GRAPH_BYTES
    assert "a call failed for want of memory: no room for 4.0 GiB" in caplog.text
