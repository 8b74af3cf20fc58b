"""The bounded queue in front of a stage's compute thread.

Backwards come before forwards, and older work before newer: with the hop's credits this gives a 1F1B schedule.
Generation and training take turns. Pure: the runtime has the threads, and drops tasks that are not wanted any more.
"""

import heapq
import itertools
from collections import deque
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
    """A priority queue that takes new work up to `capacity` tasks. Not thread-safe: the runtime holds its lock."""

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
        """Add a task; `drop` takes it out, until it starts.

        Raises:
            Overloaded: the queue is full. Only new work is refused: there is little control work, and a
                backward ends something that was taken on.
        """
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
