"""What the defences against liars cost in one process: their functions are timed, wherever they are called.

What gRPC does in threads of its own is not counted.
"""

import inspect
import threading
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from swarm.honesty.comparison import Comparison
from swarm.hop import spot_checks
from swarm.stage import own_answers, spot_check
from swarm.stage.backend import StageBackend
from swarm.stage.own_answers import OwnAnswers
from swarm.stage.spot_check import SpotCheck
from swarm.training.sketches import Sketch, Sketched, Statement

COUNTED = {
    "comparing": ((Comparison, "deviations"),),
    "sketching": (
        (Sketch, "of"), (Sketched, "stated"), (Sketched, "fault"), (OwnAnswers, "state"), (Statement, "signer"),
    ),
    "checking": (
        (StageBackend, "compute_again"), (SpotCheck, "answer"), (spot_checks, "ask"),
        (spot_checks, "digests_of"), (spot_check, "digests_of"),
    ),
    "showing": ((OwnAnswers, "show"), (own_answers, "digests_of")),
}  # fmt: skip
"""What each defence does, by the classes and modules that have these functions."""


class Costs:
    """The processor's seconds that each defence took, in all threads of Python."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(COUNTED, 0.0)
        self.num_calls = Counter[str]()
        """Of the functions that are no coroutines."""
        self.by_function = defaultdict[str, float](float)
        """The seconds of each function."""
        self._lock = threading.Lock()
        self._thread = threading.local()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count inside the block."""
        with ExitStack() as stack:
            for kind, functions in COUNTED.items():
                for owner, name in functions:
                    timed = self._timed_calls(kind, getattr(owner, name))
                    stack.enter_context(mock.patch.object(owner, name, timed))
            yield

    def _timed_calls(self, kind: str, true: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(true):

            async def step_by_step(*arguments: Any, **options: Any) -> Any:
                return await self._timed_steps(kind, true, true(*arguments, **options))

            return step_by_step

        def at_once(*arguments: Any, **options: Any) -> Any:
            with self._timed(kind, true):
                self.num_calls[true.__name__] += 1
                return true(*arguments, **options)

        return at_once

    @types.coroutine
    def _timed_steps(
        self, kind: str, true: Callable[..., Any], work: Coroutine[Any, Any, Any]
    ) -> Generator[Any, Any, Any]:
        """Run a coroutine, and count what it does between its waits."""
        resume: Callable[[], Any] = partial(work.send, None)
        while True:
            try:
                with self._timed(kind, true):
                    waited_for = resume()
            except StopIteration as end:
                return end.value
            try:
                resume = partial(work.send, (yield waited_for))
            except BaseException as error:  # noqa: BLE001 - it is the work's to handle
                resume = partial(work.throw, error)

    @contextmanager
    def _timed(self, kind: str, true: Callable[..., Any]) -> Iterator[None]:
        if getattr(self._thread, "is_counted", False):  # By the caller.
            yield
            return
        self._thread.is_counted, began = True, time.thread_time()
        try:
            yield
        finally:
            self._thread.is_counted = False
            with self._lock:
                self.seconds[kind] += (seconds := time.thread_time() - began)
                self.by_function[true.__qualname__] += seconds
