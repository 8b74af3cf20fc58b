"""How much a meeting point carries, and for whom."""

import asyncio

import pytest

from swarm.rpc.callers import Caller
from swarm.rpc.meeting.carrying import Budget, MeetingLimits
from tests.support.manual_clock import ManualClock

ONE, TWO = Caller("one"), Caller("two")


async def _seconds(budget: Budget, clock: ManualClock, caller: Caller, num_bytes: int) -> float:
    """How long a caller's bytes wait."""
    began_at = clock.monotonic()
    spending = asyncio.create_task(budget.spend(caller, num_bytes))
    while not spending.done():
        await asyncio.sleep(0)
        clock.advance(0.125)
        await asyncio.sleep(0)
    return clock.monotonic() - began_at


@pytest.mark.parametrize(("is_exchanging", "expected"), [(False, 1.0), (True, 4.0)])
async def test_a_caller_alone_has_the_line_and_less_while_the_peer_averages(
    is_exchanging: bool, expected: float
) -> None:
    clock = ManualClock()
    budget = Budget(MeetingLimits(bytes_per_second=1000.0), clock, lambda: is_exchanging)
    assert await _seconds(budget, clock, ONE, 1000) == pytest.approx(expected, abs=0.5)
    assert budget.num_bytes == 1000


async def test_one_that_has_sent_much_over_many_connections_does_not_hold_up_another() -> None:
    clock = ManualClock()
    budget = Budget(MeetingLimits(bytes_per_second=1000.0), clock, lambda: False)
    greedy = [asyncio.create_task(budget.spend(ONE, 1000)) for _ in range(20)]
    await asyncio.sleep(0)
    assert await _seconds(budget, clock, TWO, 1000) == pytest.approx(2.0, abs=0.5)
    assert sum(task.done() for task in greedy) <= 2
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)
