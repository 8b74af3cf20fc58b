"""One microbatch's computation, ended at odd moments."""

import asyncio
from typing import cast

import pytest

from swarm.errors import NotReady
from swarm.hop import Microbatch
from swarm.stage.backend import StageBackend
from swarm.stage.computation import Computation
from swarm.stage.runtime import Runtime


class Backend:
    """Of stage 0; nothing is computed."""

    stage, is_last = 0, False


async def test_one_that_is_given_up_before_it_began_says_so() -> None:
    """Else whoever waits for the answer is told for ever that it is under way."""
    computation = Computation(
        microbatch=Microbatch(index=0, round=0, num_samples=1), wire_inputs={}, accumulate=True, age=0, hints={},
        backend=cast(StageBackend, Backend()), runtime=cast(Runtime, None), hop=None,
    )  # fmt: skip
    async with asyncio.TaskGroup() as tasks:
        computation.start(tasks)
        computation.stop()
        await computation.news(10.0)
    assert computation.done
    with pytest.raises(NotReady, match="given up"):
        computation.result()
