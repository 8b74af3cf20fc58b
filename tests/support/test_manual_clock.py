import asyncio

from tests.support.manual_clock import ManualClock


async def test_manual_clock_wakes_sleepers_whose_time_has_come() -> None:
    clock = ManualClock(start=100.0)
    woken: list[float] = []

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    async with asyncio.TaskGroup() as tasks:
        for seconds in (3.0, 1.0, 2.0):
            tasks.create_task(sleep(seconds))
        await asyncio.sleep(0)
        clock.advance(0.5)
        await asyncio.sleep(0)
        assert woken == []
        clock.advance(1.5)
        await asyncio.sleep(0)
        assert sorted(woken) == [1.0, 2.0]
        clock.advance(1.0)
    assert sorted(woken) == [1.0, 2.0, 3.0]
    assert clock.monotonic() == clock.time() == 103.0
