"""Tasks that outlive the call that asks for them."""

import asyncio

import pytest

from swarm.errors import NotReady
from swarm.machine.tasks import spawn


async def _work() -> int:
    return 7


async def test_a_task_of_the_group_is_awaited_by_it() -> None:
    async with asyncio.TaskGroup() as tasks:
        task = spawn(tasks, _work())
    assert task.result() == 7


async def test_what_comes_after_the_groups_end_is_refused_and_leaves_no_coroutine_behind() -> None:
    async with asyncio.TaskGroup() as tasks:
        pass
    with pytest.raises(NotReady, match="stopping"):
        spawn(tasks, _work())
