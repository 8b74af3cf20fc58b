"""Stages commit together, and their leaders find each other whatever fails between them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swarm.averaging.agreement.timing import Timing
from swarm.averaging.averager import Averager
from swarm.averaging.barrier import Barrier
from swarm.averaging.wire.transport import BARRIER, contact_of
from swarm.errors import DeadlineExceeded
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import Block, PeerRecord
from tests.averaging.doubles import Network, make_context, network_of, peer_id, record, stages, until
from tests.averaging.fake_stage import FakeStage, make_config
from tests.averaging.outcomes import assert_equal_and_once
from tests.support.virtual_time import LoopClock, in_virtual_time

TIMING = Timing()


class OtherStage:
    """Stage 1, which has two peers. The one with the lower id led before, and cannot be reached. The other one leads
    now, and becomes ready at some time."""

    def __init__(self, ready_at: float, back_at: float = float("inf")) -> None:
        self.clock = LoopClock()
        self.ready_at, self.back_at = self.clock.monotonic() + ready_at, self.clock.monotonic() + back_at
        self.calls: list[tuple[int, float]] = []
        """The peers that this stage asked, and how long each call took."""
        self.lie: float | None = None
        """The norm that the lower peer claims, by which all gradients would be clipped."""

    async def call(self, peer: PeerRecord, method: Any, request: Any, *, timeout_seconds: float) -> Any:
        started_at = self.clock.monotonic()
        is_cut_off = peer.peer_id == peer_id(1)
        number = 1 if is_cut_off else 2
        try:
            async with asyncio.timeout(timeout_seconds):
                if is_cut_off and started_at < self.back_at:
                    await asyncio.sleep(1e9)
                await asyncio.sleep(max(0.0, min(request.wait_seconds, self.ready_at - started_at)))
        except TimeoutError:
            raise DeadlineExceeded("no answer") from None
        finally:
            self.calls.append((number, self.clock.monotonic() - started_at))
        if is_cut_off and self.lie is not None:
            return pb.BarrierReply(
                ready=True, squared_norm=self.lie, own_squared_norm=self.lie, leader=contact_of(record(1, 1))
            )
        is_ready = self.clock.monotonic() >= self.ready_at
        return pb.BarrierReply(
            ready=is_ready, squared_norm=4.0, own_squared_norm=4.0, leader=contact_of(record(number, 1))
        )

    async def wait(self) -> float:
        """Wait for the other stage as stage 0 does. Return for how many seconds the other stage had been ready at the
        end."""
        context = make_context(record(9), lambda block: [record(1, block.stage), record(2, block.stage)], timing=TIMING)
        member = FakeStage()
        member.round = 7
        own = Averager(context, member)
        barrier = Barrier(context, own.place, own.shared, own.watch, self.call, own.own_round)
        replies = await barrier.wait_for([Block(1)], 7, "")
        assert replies is not None
        assert (replies[Block(1)].ready, replies[Block(1)].squared_norm) == (True, 4.0)
        return self.clock.monotonic() - self.ready_at


@pytest.mark.parametrize("ready_at", [6.5, 8.0, 10.0, 12.5, 14.5, 17.0])
@in_virtual_time
async def test_a_stage_that_is_ready_does_not_wait_for_a_trial_of_one_that_cannot_be_reached(ready_at: float) -> None:
    stage = OtherStage(ready_at)
    late_seconds = await stage.wait()
    assert late_seconds <= TIMING.call_seconds + 2 * TIMING.retry_seconds + TIMING.grace_seconds + 1e-6
    trials = [seconds for number, seconds in stage.calls[1:] if number == 1]
    assert all(seconds <= TIMING.call_seconds + 1e-6 for seconds in trials)


@pytest.mark.parametrize("lie", [float("nan"), float("inf"), -1.0])
@in_virtual_time
async def test_a_norm_that_is_none_is_not_believed_and_another_peer_of_that_stage_asked(lie: float) -> None:
    stage = OtherStage(ready_at=0.0, back_at=0.0)
    stage.lie = lie
    await stage.wait()
    assert [number for number, _ in stage.calls] == [1, 2, 1]


@pytest.mark.parametrize(("lie", "num_peers"), [(1e290, 3), (0.0, 3), (1e290, 2)])
@in_virtual_time
async def test_one_member_of_another_stage_does_not_decide_by_which_norm_gradients_are_clipped(
    lie: float, num_peers: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with network_of(make_config(stages=2)) as network:
        first, second = list(range(1, 1 + num_peers)), list(range(4, 4 + num_peers))
        for number in (*first, *second):
            network.add(number, number // 4)
        liar = network.peers[peer_id(4)]

        async def belie(request: pb.BarrierRequest) -> pb.BarrierReply:
            reply = await liar.averager.handlers.handle(BARRIER, request)
            if reply.ready:
                reply.squared_norm = reply.own_squared_norm = lie
            return reply

        liar.instead[BARRIER.name] = belie
        for index in range(6):
            for numbers in (first, second):
                stages(network, numbers[index % num_peers])[0].learn(index)
        await until(lambda: all(peer.stage.round == 1 for peer in network.peers.values()))
        honest, misled = stages(network, 4)[0].results[0], stages(network, 1)[0].results[0]
        assert misled.total_squared_norm == pytest.approx(honest.total_squared_norm)
        assert f"{liar.record.peer_id} says that the squared norm of stage 1 is {lie:g} in round 0" in caplog.text


@asynccontextmanager
async def two_stages() -> AsyncIterator[Network]:
    """Peers 1 and 2 at stage 0, 3 and 4 at stage 1."""
    async with network_of(make_config(stages=2)) as network:
        for number in (1, 2, 3, 4):
            network.add(number, (number - 1) // 2)
        yield network


@in_virtual_time
async def test_no_stage_commits_before_all_are_prepared() -> None:
    async with two_stages() as network:
        first, second = stages(network, 1, 2), stages(network, 3, 4)
        first[0].learn(0, 1, 2)
        first[1].learn(3, 4, 5)
        second[0].learn(0, 1, 2, 3)
        await asyncio.sleep(0.8)
        assert all(stage.closed for stage in first)
        assert all(stage.round == 0 for stage in [*first, *second])
        second[1].learn(4, 5)
        await until(lambda: all(stage.round == 1 for stage in [*first, *second]))
        norms = [stage.results[0].squared_norm for stage in (first[0], second[0])]
        totals = {stage.results[0].total_squared_norm for stage in [*first, *second]}
        assert totals == {norms[0] + norms[1]}
        assert_equal_and_once(first)
        assert_equal_and_once(second)


@in_virtual_time
async def test_a_leader_that_is_named_as_one_of_another_stage_asks_that_stage_all_the_same() -> None:
    """A member of the other stage may say so, and a peer that has moved may still be announced at its former stage."""
    async with two_stages() as network:
        first, second = stages(network, 1, 2), stages(network, 3, 4)
        other, named = network.peers[peer_id(3)], contact_of(network.peers[peer_id(1)].record)

        async def name_the_asker(request: pb.BarrierRequest) -> pb.BarrierReply:
            reply = await other.averager.handlers.handle(BARRIER, request)
            return reply if reply.ready else pb.BarrierReply(ready=False, leader=named)

        other.instead[BARRIER.name] = name_the_asker
        for index in range(6):
            first[index % 2].learn(index)
        await until(lambda: all(stage.closed for stage in first))
        await asyncio.sleep(5.0)
        for index in range(6):
            second[index % 2].learn(index)
        await until(lambda: all(stage.round == 1 for stage in [*first, *second]))
        assert_equal_and_once(first)


@in_virtual_time
async def test_what_is_decided_is_not_missed_when_its_member_goes() -> None:
    """A stage that waits at the barrier already has all that it needs, even if one of its members leaves."""
    async with two_stages() as network:
        first, second = stages(network, 1, 2), stages(network, 3, 4)
        first[0].learn(0, 1, 2)
        first[1].learn(3, 4, 5)
        second[0].learn(0, 1, 2, 3)
        view = network.peers[peer_id(1)].averager.view
        await until(lambda: view().complete and all(stage.closed for stage in first))
        await asyncio.sleep(0.3)
        network.kill(2)
        await until(lambda: len(view().progress) == 1)
        assert view().committed == view().shown == frozenset(range(6))
        assert view().complete
        second[1].learn(4, 5)
        await until(lambda: all(stage.round == 1 for stage in [first[0], *second]))


@in_virtual_time
async def test_leaders_that_do_not_get_through_to_each_other_hear_through_others() -> None:
    """The line between two machines may not work although both of them reach others."""
    async with two_stages() as network:
        first, second = stages(network, 1, 2), stages(network, 3, 4)
        network.cut.add(frozenset({1, 3}))
        for index in range(6):
            first[index % 2].learn(index)
            second[index % 2].learn(index)
        await until(lambda: all(stage.round == 1 for stage in [*first, *second]))
        assert_equal_and_once(first)
        assert_equal_and_once(second)


@in_virtual_time
async def test_leader_dies_at_the_barrier_after_the_other_stage_relied_on_it() -> None:
    """Stage 1 commits because of stage 0's answer, so the survivor of stage 0 must commit the same result."""
    async with two_stages() as network:
        first, second = stages(network, 1, 2), stages(network, 3, 4)

        async def before(name: str, source: int, target: int) -> None:
            if name == "Commit" and source == 1:
                network.kill(1)
            if name == "Barrier" and source == 1:
                # Stage 1 gets its answer first.
                await asyncio.sleep(0.3)

        network.before = before
        for index in range(6):
            first[index % 2].learn(index)
            second[index % 2].learn(index)
        await until(lambda: all(stage.round == 1 for stage in second))
        network.kill(1)
        assert first[1].round == 0
        await until(lambda: first[1].round == 1)
        result = first[1].results[0]
        assert len(result.members) == 2
        assert result.total_squared_norm == second[0].results[0].total_squared_norm
