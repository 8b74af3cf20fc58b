"""Time that the machine owns: its own clock, wall clocks that are set, and sleep."""

import asyncio
import time

import pytest

from swarm.errors import NotReady
from swarm.machine import clock
from swarm.machine.clock import DOUBT_SECONDS, Loop, SteadyTime, SystemClock, clock_through_sleep, run_loop, spawn
from tests.support.manual_clock import SetClock


def test_steady_time_follows_a_slow_clock_at_once_and_a_jump_after_a_while() -> None:
    clock = SetClock(start=50.0)
    steady = SteadyTime(clock)
    clock.ahead = 1.0
    assert steady.now() == 51.0
    clock.ahead = 101.0
    assert steady.now() == 51.0
    clock.advance(DOUBT_SECONDS - 1)
    assert steady.now() == 50.0 + DOUBT_SECONDS
    clock.advance(1.0)
    assert steady.now() == clock.time()


def test_steady_time_never_hears_of_a_clock_that_is_set_back_in_time() -> None:
    clock = SetClock()
    steady = SteadyTime(clock)
    clock.ahead = -3600.0
    assert steady.now() == 0.0
    clock.advance(10.0)
    clock.ahead = 0.0
    assert steady.now() == 10.0
    clock.advance(DOUBT_SECONDS)
    assert steady.now() == clock.time()


# -- a machine that sleeps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "right", "wrong"),
    [("linux", "CLOCK_BOOTTIME", "CLOCK_MONOTONIC_RAW"), ("darwin", "CLOCK_MONOTONIC_RAW", "CLOCK_UPTIME_RAW")],
)
def test_the_clock_of_each_platform_goes_on_while_it_sleeps(
    platform: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept_seconds = 3600.0
    monkeypatch.setattr(time, "clock_gettime", {1: 10.0 + slept_seconds, 2: 10.0}.__getitem__)
    assert clock_through_sleep(platform, {right: 1, wrong: 2})() == 3610.0


def test_the_programs_event_loop_has_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a deadline that passed while the machine slept is over when it wakes."""
    real, slept = clock.monotonic, 0.0
    monkeypatch.setattr(clock, "monotonic", lambda: real() + slept)

    async def look() -> None:
        nonlocal slept
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        before = loop.time()
        assert before <= SystemClock().monotonic() <= loop.time()
        await asyncio.sleep(0.05)
        assert loop.time() - before >= 0.05
        deadline = loop.time() + 3600.0
        slept = 3600.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await asyncio.Event().wait()

    run_loop(look())


async def _work() -> int:
    return 7


async def test_what_comes_after_the_groups_end_is_refused_and_leaves_no_coroutine_behind() -> None:
    async with asyncio.TaskGroup() as tasks:
        pass
    with pytest.raises(NotReady, match="stopping"):
        spawn(tasks, _work())
