"""One microbatch's computation, ended at odd moments."""

import asyncio
import contextlib
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swarm.errors import NotReady
from swarm.stage.backend import StageBackend
from swarm.stage.computation import Computation, Order
from swarm.stage.runtime import Runtime
from swarm.training.samples import Microbatch
from tests.support.chain import eventually


class Backend:
    """A backend of stage 0 that computes nothing."""

    stage, is_last = 0, False


def _computation(backend: object, runtime: Runtime) -> Computation:
    order = Order(
        microbatch=Microbatch(index=0, round=0, num_samples=1),
        wire_inputs={"tokens": torch.zeros(1, 3)},
        accumulate=True,
        answers_gradient=True,
        age=0,
        hints={},
    )
    return Computation(
        order, backend=cast(StageBackend, backend), runtime=runtime, hop=None, turn=contextlib.nullcontext()
    )


async def test_one_that_is_given_up_before_it_began_says_so() -> None:
    """Otherwise a call that waits for the answer would always be told that the computation is under way."""
    computation = _computation(Backend(), cast(Runtime, None))
    async with asyncio.TaskGroup() as tasks:
        computation.start(tasks)
        computation.stop()
        await computation.news(10.0)
    assert computation.done
    with pytest.raises(NotReady, match="given up"):
        computation.result()


async def _checked(*_: object) -> None:
    pass


class LastBackend:
    """A backend of the last stage that counts what is computed."""

    stage, is_last, num_computed = 1, True, 0
    weights = SimpleNamespace(require_sound=lambda: None)
    function = SimpleNamespace(checked=_checked)
    boundary_in = staticmethod(lambda _: None)

    def forward_loss(self, *_: Any, **__: Any) -> tuple[float, None, None]:
        self.num_computed += 1
        return 1.0, None, None


@pytest.mark.parametrize("moment", ["before it begins", "while it waits for its turn"])
async def test_nothing_is_computed_for_a_call_that_is_gone_until_a_retry_comes(moment: str) -> None:
    runtime, backend, other_work = Runtime(queue_capacity=4), LastBackend(), threading.Event()
    computation = _computation(backend, runtime)
    runtime.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(runtime.control(other_work.wait))
            computation.subscribe("a call")
            computation.start(tasks)
            if moment == "while it waits for its turn":
                await eventually(lambda: runtime.queue_length == 2)
            computation.orphan()
            other_work.set()
            await eventually(lambda: runtime.queue_length == 0)
            await asyncio.sleep(0.05)
            assert (backend.num_computed, computation.done) == (0, False)
            computation.subscribe("the retry")
            await eventually(lambda: computation.done)
    finally:
        other_work.set()
        runtime.stop(5.0)
    assert (backend.num_computed, computation.result().loss) == (1, 1.0)


@pytest.mark.parametrize("is_broken", [False, True])
async def test_a_failed_microbatch_ends_the_peer_only_if_its_weights_are_broken(is_broken: bool) -> None:
    """Otherwise a sum would keep a gradient that the ledger does not know, and the stage would take no more steps."""

    def require_sound() -> None:
        if is_broken:
            raise MemoryError

    class FailingBackend(LastBackend):
        weights = SimpleNamespace(require_sound=require_sound)

        def forward_loss(self, *_: Any, **__: Any) -> tuple[float, None, None]:
            raise MemoryError

    runtime = Runtime(queue_capacity=4)
    computation = _computation(FailingBackend(), runtime)
    runtime.start()
    try:
        with pytest.raises(ExceptionGroup) if is_broken else contextlib.nullcontext():
            async with asyncio.TaskGroup() as tasks:
                computation.subscribe("a call")
                computation.start(tasks)
    finally:
        runtime.stop(5.0)
    with pytest.raises(MemoryError):
        computation.result()
