"""The queue returns the most urgent task that is still wanted, and refuses new work when it is full."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import Overloaded
from swarm.stage.task_queue import Priority, TaskQueue

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


def test_backward_of_a_newer_microbatch_precedes_an_older_forward() -> None:
    queue = TaskQueue(10)
    queue.push(lambda: "forward 0", priority=Priority.FORWARD, age=0)
    queue.push(lambda: "backward 3", priority=Priority.BACKWARD, age=3)
    queue.push(lambda: "backward 1", priority=Priority.BACKWARD, age=1)
    queue.push(lambda: "control", priority=Priority.CONTROL, age=0)
    assert _popped(queue) == ["control", "backward 1", "backward 3", "forward 0"]


def test_a_task_that_nobody_wants_is_gone_at_once() -> None:
    queue = TaskQueue(10)
    unwanted = queue.push(lambda: "unwanted", priority=Priority.FORWARD, age=0)
    queue.push(lambda: "wanted", priority=Priority.FORWARD, age=1)
    queue.drop(unwanted)
    assert unwanted.future.cancelled()
    assert len(queue) == 1
    queue.drop(unwanted)
    assert _popped(queue) == ["wanted"]


def test_a_task_that_is_cancelled_in_that_moment_does_not_run() -> None:
    queue = TaskQueue(10)
    unwanted = queue.push(lambda: "unwanted", priority=Priority.BACKWARD, age=0)
    queue.push(lambda: "wanted", priority=Priority.FORWARD, age=1)
    assert unwanted.future.cancel()
    assert _popped(queue) == ["wanted"]


def test_a_task_that_was_popped_goes_on() -> None:
    queue = TaskQueue(1)
    task = queue.push(lambda: None, priority=Priority.FORWARD, age=0)
    assert queue.pop() is task
    queue.drop(task)
    assert not task.future.cancelled()


def test_a_full_queue_refuses_new_work() -> None:
    queue = TaskQueue(2)
    for age in range(2):
        queue.push(lambda: None, priority=Priority.FORWARD, age=age)
    with pytest.raises(Overloaded) as refusal:
        queue.push(lambda: None, priority=Priority.FORWARD, age=2)
    assert refusal.value.retry_after_seconds > 0
    assert len(queue) == 2


@pytest.mark.parametrize("priority", [Priority.CONTROL, Priority.BACKWARD])
def test_a_full_queue_still_takes_what_ends_work(priority: Priority) -> None:
    queue = TaskQueue(1)
    queue.push(lambda: "forward", priority=Priority.FORWARD, age=0)
    queue.push(lambda: "ends", priority=priority, age=0)
    assert _popped(queue) == ["ends", "forward"]
