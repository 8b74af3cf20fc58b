"""How much a meeting point carries, and for whom."""

import asyncio

import pytest

from swarm.errors import Overloaded
from swarm.rpc.callers import Caller
from swarm.rpc.meeting.budget import Budget, MeetingLimits
from tests.support.manual_clock import ManualClock

ONE, TWO = Caller("one"), Caller("two")


def test_connections_are_counted_for_each_caller_and_in_all() -> None:
    budget = Budget(MeetingLimits(max_connections=3, max_connections_each=2), ManualClock(), lambda: False)
    with budget.connection(ONE), budget.connection(ONE):
        with pytest.raises(Overloaded), budget.connection(ONE):
            pass
        with budget.connection(TWO):
            assert budget.num_connections == 3
            with pytest.raises(Overloaded), budget.connection(TWO):
                pass
    assert budget.num_connections == 0


async def _seconds(budget: Budget, clock: ManualClock, caller: Caller, num_bytes: int) -> float:
    """How long a caller's bytes wait."""
    began_at = clock.monotonic()
    spending = asyncio.create_task(budget.spend(caller, num_bytes))
    while not spending.done():
        await asyncio.sleep(0)
        clock.advance(0.125)
        await asyncio.sleep(0)
    return clock.monotonic() - began_at


@pytest.mark.parametrize(("is_exchanging", "expected"), [(False, 2.0), (True, 8.0)])
async def test_a_caller_has_its_share_and_less_while_the_peer_averages(is_exchanging: bool, expected: float) -> None:
    clock = ManualClock()
    budget = Budget(MeetingLimits(bytes_per_second=1000.0, share_each=0.5), clock, lambda: is_exchanging)
    assert await _seconds(budget, clock, ONE, 1000) == pytest.approx(expected, abs=0.5)
    assert budget.num_bytes == 1000
