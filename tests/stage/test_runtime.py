"""The compute thread runs one task at a time, in order of priority, and survives what tasks raise."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import Overloaded
from swarm.stage.runtime import MOST_AGES, Priority, Runtime, TaskQueue
from tests.support.chain import eventually

_OF_TRAINING = [Priority.CONTROL, Priority.BACKWARD, Priority.FORWARD]
_ORDERS = st.lists(st.tuples(st.sampled_from(_OF_TRAINING), st.integers(0, 5)), max_size=20)


def _popped(queue: TaskQueue) -> list[Any]:
    results = []
    while (task := queue.pop()) is not None:
        results.append(task.work())
    return results


@given(_ORDERS)
def test_order_is_priority_then_age_then_submission(order: list[tuple[Priority, int]]) -> None:
    queue = TaskQueue(100)
    for number, (priority, age) in enumerate(order):
        queue.push(partial(int, number), priority=priority, age=age)
    expected = sorted(range(len(order)), key=lambda number: (*order[number], number))
    assert _popped(queue) == expected


def test_generation_and_training_take_turns() -> None:
    queue = TaskQueue(10)
    for number in range(3):
        queue.push(partial(str, f"text {number}"), priority=Priority.GENERATION, age=0)
        queue.push(partial(str, f"forward {number}"), priority=Priority.FORWARD, age=number)
    queue.push(lambda: "control", priority=Priority.CONTROL, age=0)
    assert len(queue) == 4
    in_turns = [f"{kind} {number}" for number in range(3) for kind in ("text", "forward")]
    assert _popped(queue) == ["control", *in_turns]
    queue.push(lambda: "text 3", priority=Priority.GENERATION, age=0)
    queue.push(lambda: "text 4", priority=Priority.GENERATION, age=0)
    assert _popped(queue) == ["text 3", "text 4"]


def test_a_task_that_is_cancelled_in_that_moment_does_not_run() -> None:
    queue = TaskQueue(10)
    unwanted = queue.push(lambda: "unwanted", priority=Priority.BACKWARD, age=0)
    queue.push(lambda: "wanted", priority=Priority.FORWARD, age=1)
    assert unwanted.future.cancel()
    assert _popped(queue) == ["wanted"]


def test_a_full_queue_refuses_new_work() -> None:
    queue = TaskQueue(2)
    for age in range(2):
        queue.push(lambda: None, priority=Priority.FORWARD, age=age)
    with pytest.raises(Overloaded) as refusal:
        queue.push(lambda: None, priority=Priority.FORWARD, age=2)
    assert refusal.value.retry_after_seconds > 0
    assert len(queue) == 2


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    runtime = Runtime(queue_capacity=3)
    runtime.start()
    yield runtime
    runtime.stop(5.0)


def test_a_microbatch_keeps_its_age_at_all_blocks_of_a_thread() -> None:
    runtime = Runtime(queue_capacity=8)
    ages = [runtime.age_of(index) for index in (7, 9, 7, 8, 9)]
    assert ages[0] == ages[2] < ages[1] == ages[4] < ages[3]
    for index in range(1000, 1000 + MOST_AGES):
        runtime.age_of(index)
    assert runtime.age_of(7) > ages[3], "only the newest are remembered"


class _Blocked:
    """Keeps the thread busy until it is released."""

    def __init__(self, runtime: Runtime) -> None:
        self._started, self._release = threading.Event(), threading.Event()
        self.task = asyncio.create_task(runtime.control(self._wait))

    def _wait(self) -> None:
        self._started.set()
        assert self._release.wait(10)

    async def __aenter__(self) -> "_Blocked":
        await asyncio.to_thread(self._started.wait, 10)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()
        with suppress(asyncio.CancelledError):
            await self.task

    def release(self) -> None:
        self._release.set()


async def test_cancelled_work_that_waits_never_runs(runtime: Runtime) -> None:
    ran = False

    def work() -> None:
        nonlocal ran
        ran = True

    async with _Blocked(runtime):
        task = asyncio.create_task(runtime.run(work, priority=Priority.FORWARD))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runtime.queue_length == 1, "what keeps the thread busy, and nothing else"
    await runtime.run(lambda: None, priority=Priority.FORWARD)
    assert not ran


async def test_cancelled_work_that_runs_comes_to_its_end(runtime: Runtime) -> None:
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        release.wait(10)
        ended.set()

    task = asyncio.create_task(runtime.run(work, priority=Priority.FORWARD))
    await asyncio.to_thread(started.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    await runtime.control(lambda: None)
    assert ended.is_set()


def _is_stopping(runtime: Runtime) -> bool:
    try:
        runtime.submit(lambda: None, priority=Priority.FORWARD)
    except asyncio.CancelledError:
        return True
    except Overloaded:
        pass
    return False


async def test_stop_cancels_what_waits_and_refuses_what_comes_later(runtime: Runtime) -> None:
    async with _Blocked(runtime) as blocked:
        task = asyncio.create_task(runtime.run(int, priority=Priority.FORWARD))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(asyncio.to_thread(runtime.stop, 10))
        await eventually(lambda: _is_stopping(runtime))
        blocked.release()
        await stopping
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(asyncio.CancelledError):
            await runtime.control(int)


async def test_an_error_that_is_kept_keeps_nothing_of_the_failed_task(runtime: Runtime) -> None:
    """Its cause, another error, does not keep anything either."""
    held: list[weakref.ref[torch.Tensor]] = []

    def inner() -> None:
        tensor = torch.zeros(1)
        held.append(weakref.ref(tensor))
        raise ValueError("first")

    def work() -> None:
        tensor = torch.zeros(1)
        held.append(weakref.ref(tensor))
        try:
            inner()
        except ValueError:
            raise RuntimeError("second") from None

    gc.disable()
    try:
        with pytest.raises(RuntimeError) as kept:
            await runtime.control(work)
        assert [reference() for reference in held] == [None, None]
        assert kept.value.__traceback__ is not None, "where it happened can still be told"
    finally:
        gc.enable()
