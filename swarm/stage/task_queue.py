"""The bounded queue in front of a stage's compute thread.

Backward before forward, older before newer: with the hop's credits this gives a 1F1B schedule. Work whose
owner has gone is dropped when its turn comes. Pure: the runtime brings the threads.
"""

import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from swarm.errors import Overloaded


class Priority(IntEnum):
    """Kinds of work, most urgent first."""

    CONTROL = 0
    """Short work on the stage's state: closing a bucket, a snapshot, a commit."""
    BACKWARD = 1
    FORWARD = 2
    EVALUATE = 3


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


@dataclass(frozen=True, kw_only=True)
class QueueStatistics:
    """A reading of the queue."""

    length: int
    capacity: int
    num_submitted: int
    num_dropped: int


class TaskQueue:
    """A priority queue that takes new work up to `capacity` tasks. Not thread-safe: the runtime holds its lock."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._heap: list[Task] = []
        self._numbers = itertools.count()
        self._num_submitted = 0
        self._num_dropped = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, work: Callable[[], Any], *, priority: Priority, age: int) -> Future[Any]:
        """Add a task; its future can be cancelled until it starts.

        Raises:
            Overloaded: the queue is full. Only new work is refused: there is little control work, and a
                backward ends something that was taken on.
        """
        if len(self._heap) >= self._capacity and priority >= Priority.FORWARD:
            raise Overloaded(f"{len(self._heap)} tasks wait already", retry_after_seconds=1.0)
        task = Task(priority=priority, age=age, number=next(self._numbers), work=work, future=Future())
        heapq.heappush(self._heap, task)
        self._num_submitted += 1
        return task.future

    def pop(self) -> Task | None:
        """The most urgent task that is still wanted, marked as running; None if there is none."""
        while self._heap:
            task = heapq.heappop(self._heap)
            if task.future.set_running_or_notify_cancel():
                return task
            self._num_dropped += 1
        return None

    def statistics(self) -> QueueStatistics:
        """Lengths now and counts since the start."""
        return QueueStatistics(
            length=len(self._heap),
            capacity=self._capacity,
            num_submitted=self._num_submitted,
            num_dropped=self._num_dropped,
        )
