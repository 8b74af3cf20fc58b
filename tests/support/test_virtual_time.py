"""Virtual time passes in the right order, and takes none of the machine's time."""

import asyncio
import contextvars
import time

import pytest

from tests.support.virtual_time import PROCESS, THREAD_SECONDS, LoopClock, run, virtual_loop


def test_an_hour_of_waiting_takes_no_time_and_keeps_its_order() -> None:
    async def wait(seconds: float, seen: list[float]) -> None:
        await asyncio.sleep(seconds)
        seen.append(LoopClock().monotonic())

    async def main() -> list[float]:
        seen: list[float] = []
        await asyncio.gather(*(wait(seconds, seen) for seconds in (3600.0, 1.0, 60.0)))
        return seen

    started_at = time.monotonic()
    assert run(main()) == pytest.approx([1.0, 60.0, 3600.0])
    assert time.monotonic() - started_at < 10.0


def test_work_for_threads_takes_a_moment_in_which_others_run() -> None:
    async def main() -> list[str]:
        seen: list[str] = []
        work = asyncio.create_task(asyncio.to_thread(seen.append, "thread"))
        await asyncio.sleep(THREAD_SECONDS / 2)
        seen.append("loop")
        await work
        assert LoopClock().monotonic() == pytest.approx(THREAD_SECONDS)
        return seen

    assert run(main()) == ["loop", "thread"]


def test_a_deadlock_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="never happen"):
        run(main())


def test_a_stopped_process_does_nothing_and_then_everything_at_once() -> None:
    async def work(name: str, seen: list[tuple[str, float]]) -> None:
        PROCESS.set(name)
        for _ in range(3):
            await asyncio.sleep(1.0)
            seen.append((name, LoopClock().monotonic()))

    async def expire() -> float:
        PROCESS.set("a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.Event().wait()
        return LoopClock().monotonic()

    async def main() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []
        tasks = [asyncio.create_task(work(name, seen)) for name in ("a", "b")]
        deadline = asyncio.create_task(expire())
        await asyncio.sleep(1.5)
        virtual_loop().stop_process("a")
        await asyncio.sleep(5.0)
        virtual_loop().continue_process("a")
        await asyncio.gather(*tasks)
        assert await deadline == pytest.approx(6.5)
        return seen

    names, seconds = zip(*run(main()), strict=True)
    assert names == ("a", "b", "b", "b", "a", "a")
    assert seconds == pytest.approx((1.0, 1.0, 2.0, 3.0, 6.5, 7.5))


def test_what_a_stopped_process_gave_up_never_happens() -> None:
    async def main() -> list[str]:
        PROCESS.set("a")
        seen: list[str] = []
        virtual_loop().stop_process("a")
        handle = virtual_loop().call_later(1.0, seen.append, "a")
        kept = virtual_loop().call_later(1.0, seen.append, "kept")
        contextvars.Context().run(virtual_loop().call_later, 2.0, handle.cancel)
        contextvars.Context().run(virtual_loop().call_later, 3.0, virtual_loop().continue_process, "a")
        await asyncio.sleep(4.0)
        assert not kept.cancelled()
        return seen

    assert run(main()) == ["kept"]
