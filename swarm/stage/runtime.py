"""LOOP 2: the compute thread of a stage peer, and the bounded queue in front of it.

Everything that touches the stage's weights or gradients runs here, one task after another, so no lock is needed. The
event loop submits work and awaits its result. An error in a task is raised to its own caller only.
"""

import asyncio
import heapq
import itertools
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

from swarm.errors import Overloaded
from swarm.stage.staging import Stopwatch

_Result = TypeVar("_Result")

MOST_AGES = 1024
"""How many microbatches' ages are remembered; more than are under way at one peer."""


class Priority(IntEnum):
    """Kinds of work, most urgent first."""

    CONTROL = 0
    """Short work on the stage's state: closing a bucket, a snapshot, a commit."""
    GENERATION = 1
    """The next positions of sessions. After each of these a microbatch has its turn, so that neither kind waits for
    long."""
    BACKWARD = 2
    FORWARD = 3
    """Forwards of microbatches, and evaluations."""


@dataclass(order=True)
class Task:
    """One piece of work; ordered by priority, then age."""

    priority: Priority
    age: int
    """Smaller is older; a microbatch's backward inherits its forward's."""
    number: int
    """Order of submission: breaks ties."""
    work: Callable[[], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)


class TaskQueue:
    """A priority queue that takes new work up to `capacity` tasks. Not thread-safe: the runtime holds its lock.

    Backwards come before forwards, and older work before newer: with the hop's credits this gives a 1F1B schedule.
    Generation and training take turns.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._heap: list[Task] = []
        self._generation: deque[Task] = deque()
        self._is_trainings_turn = False
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """The number of tasks, without those of generation, because those do not show how long a microbatch waits."""
        return len(self._heap)

    def push(self, work: Callable[[], Any], *, priority: Priority, age: int) -> Task:
        """Add a task; `drop` takes it out, until it starts. Raises Overloaded if the queue is full. Only new work is
        refused: there is little control work, and a backward ends something that was taken on."""
        if len(self._heap) >= self._capacity and priority is Priority.FORWARD:
            raise Overloaded(f"{len(self._heap)} tasks wait already", retry_after_seconds=1.0)
        task = Task(priority=priority, age=age, number=next(self._numbers), work=work, future=Future())
        if priority is Priority.GENERATION:
            self._generation.append(task)
        else:
            heapq.heappush(self._heap, task)
        return task

    def drop(self, task: Task) -> None:
        """Take out a task that is not wanted any more, so that what it holds is freed before its turn would come."""
        if task in self._heap:
            self._heap.remove(task)
            heapq.heapify(self._heap)
            task.future.cancel()

    def pop(self) -> Task | None:
        """The most urgent task that is still wanted, marked as running; None if there is none."""
        while (task := self._next()) is not None:
            # The task may have been cancelled in this moment.
            if task.future.set_running_or_notify_cancel():
                if task.priority is not Priority.CONTROL:
                    self._is_trainings_turn = task.priority is Priority.GENERATION
                return task
        return None

    def _next(self) -> Task | None:
        head = self._heap[0] if self._heap else None
        is_control = head is not None and head.priority is Priority.CONTROL
        if self._generation and not is_control and (head is None or not self._is_trainings_turn):
            return self._generation.popleft()
        return heapq.heappop(self._heap) if self._heap else None


class Runtime:
    """Runs tasks in order of priority on a thread of its own. `stopwatch` begins to measure a task, on the device that
    does the work."""

    def __init__(
        self, *, queue_capacity: int, name: str = "compute", stopwatch: Callable[[], Stopwatch] = Stopwatch
    ) -> None:
        self._stopwatch = stopwatch
        self._queue = TaskQueue(queue_capacity)
        self._ages = itertools.count()
        self._age_of: dict[int, int] = {}
        """The newest microbatches, newest last, and their ages."""
        self._condition = threading.Condition()
        self._stopping = False
        self._running = False
        self._ended_at = time.monotonic()
        self._worked: tuple[float, float | None] = (0.0, None)
        """For how long tasks have run that have ended, and when the running one began: read together."""
        self._device_seconds = 0.0
        """By how much longer the device took for them."""
        self.longest_seconds = 0.0
        """The longest time that a task has taken so far."""
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """Let the running task end, cancel those that wait, and end the thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join(timeout_seconds)

    @property
    def quiet_seconds(self) -> float:
        """The seconds since a task ended, or since this was made."""
        return time.monotonic() - self._ended_at

    @property
    def busy_seconds(self) -> float:
        """For how long tasks have run so far: on the thread, or on the device if that took longer."""
        ended_seconds, began_at = self._worked
        running_seconds = 0.0 if began_at is None else time.monotonic() - began_at
        return ended_seconds + running_seconds + self._device_seconds

    @property
    def queue_length(self) -> int:
        with self._condition:
            return len(self._queue) + self._running

    def next_age(self) -> int:
        """The age of new work: it comes after earlier work of the same kind."""
        return next(self._ages)

    def age_of(self, microbatch: int) -> int:
        """A microbatch's age, which is the same at all blocks that compute on this thread.

        So it goes on to the next one of them before a newer one begins at the first, and few forwards are kept.
        """
        if microbatch not in self._age_of:
            self._age_of[microbatch] = self.next_age()
            if len(self._age_of) > MOST_AGES:
                del self._age_of[next(iter(self._age_of))]
        return self._age_of[microbatch]

    async def run(self, work: Callable[[], _Result], *, priority: Priority, age: int = 0) -> tuple[_Result, float]:
        """Run `work` on the thread. Once the device has finished it, return its result and the seconds that it took.

        Raises what `work` raises, Overloaded, or CancelledError if the thread stops first. Cancellation drops work that
        has not started. Work that has started runs to its end, and its result is lost.
        """

        def timed() -> tuple[_Result, Stopwatch, float]:
            stopwatch, began_at = self._stopwatch(), time.monotonic()
            result = work()
            stopwatch.stop()
            return result, stopwatch, time.monotonic() - began_at

        task = self.submit(timed, priority=priority, age=age)
        try:
            result, stopwatch, thread_seconds = await asyncio.wrap_future(task.future)
        except asyncio.CancelledError:
            with self._condition:
                self._queue.drop(task)
            raise
        seconds = await stopwatch.seconds()
        self._device_seconds += max(0.0, seconds - thread_seconds)
        return result, seconds

    def submit(self, work: Callable[[], Any], *, priority: Priority, age: int = 0) -> Task:
        """Run work on the thread without waiting for it. Only the task has its errors.

        Raises Overloaded, or CancelledError if the thread has stopped.
        """
        with self._condition:
            if self._stopping:
                raise asyncio.CancelledError
            task = self._queue.push(work, priority=priority, age=age)
            self._condition.notify()
        return task

    async def control(self, work: Callable[[], _Result]) -> _Result:
        """Run short work on the stage's state on the thread, before any microbatch."""
        result, _ = await self.run(work, priority=Priority.CONTROL)
        return result

    def _loop(self) -> None:
        while (task := self._next()) is not None:
            result: Any = None
            try:
                result = self._measured(task.work)
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                _let_go(error)
                task.future.set_exception(error)
            else:
                task.future.set_result(result)
            del task, result  # a waiting thread must not keep a microbatch's tensors alive

    def _measured(self, work: Callable[[], Any]) -> Any:
        began_at = time.monotonic()
        self._worked = (self._worked[0], began_at)
        try:
            return work()
        finally:
            # Set before the caller gets the result, because the caller may read these figures at once.
            self._ended_at = time.monotonic()
            self._worked = (self._worked[0] + self._ended_at - began_at, None)
            self.longest_seconds = max(self.longest_seconds, self._ended_at - began_at)

    def _next(self) -> Task | None:
        with self._condition:
            self._running = False
            while not self._stopping:
                task = self._queue.pop()
                if task is not None:
                    self._running = True
                    return task
                self._condition.wait()
            while (task := self._queue.pop()) is not None:
                task.future.set_exception(asyncio.CancelledError())
            return None


def _let_go(error: BaseException) -> None:
    """Clear the frames in which a task failed, because they hold a microbatch's graph or gradients.

    The caller keeps the error, and the error's traceback refers to the caller's frame. So only Python's cycle collector
    would free these frames. It does not know how large tensors are, and may run late: then, after one failure for lack
    of memory, the next microbatch would fail too.
    """
    failed: BaseException | None = error
    while failed is not None:
        traceback.clear_frames(failed.__traceback__)
        failed = failed.__context__
