"""An asyncio event loop whose time jumps to the next event. Waiting costs nothing, and every run is the same.

It is for tests that run in one process alone. Sockets and child processes cannot be used with it, because they run in
the machine's time. Work for threads runs on the loop itself, and takes `THREAD_SECONDS` of its time. Tasks that belong
to one `PROCESS` can be stopped and continued together, as SIGSTOP and SIGCONT do.
"""

import asyncio
import contextvars
import functools
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

from swarm.machine.clock import SystemClock

T = TypeVar("T")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")

THREAD_SECONDS = 0.001
"""How much virtual time passes while a thread would work. Other things may happen in this time."""

PROCESS: ContextVar[object] = ContextVar("PROCESS", default=None)
"""The simulated process to which a task belongs. A task inherits it from the task that starts it."""


@dataclass(eq=False)
class _Callback:
    process: object
    run: Callable[[], object]
    context: Context
    handle: asyncio.Handle | None = None


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop of which the time starts at 0 and moves only when nothing is ready."""

    def __init__(self) -> None:
        self._now = 0.0
        self._stopped: dict[object, list[_Callback]] = {}
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time on. Called when nothing is ready, with the seconds until the next callback is due."""
        self._now += seconds

    # -- processes ---------------------------------------------------------------------------------------------------

    def stop_process(self, process: object) -> None:
        """Stop a process as SIGSTOP does. From its next await on it does nothing, whatever expires or arrives."""
        self._stopped.setdefault(process, [])

    def continue_process(self, process: object) -> None:
        """Continue a process as SIGCONT does. It runs all callbacks that became due meanwhile, at once and in order."""
        for callback in self._stopped.pop(process, []):
            super().call_soon(self._do, callback, context=callback.context)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        context = contextvars.copy_context() if context is None else context
        if context.get(PROCESS) is None:
            return super().call_soon(callback, *args, context=context)
        wrapped = _Callback(process=context[PROCESS], run=lambda: callback(*args), context=context)
        wrapped.handle = super().call_soon(self._do, wrapped, context=context)
        return wrapped.handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = contextvars.copy_context() if context is None else context
        if context.get(PROCESS) is None:
            return super().call_at(when, callback, *args, context=context)
        wrapped = _Callback(process=context[PROCESS], run=lambda: callback(*args), context=context)
        wrapped.handle = handle = super().call_at(when, self._do, wrapped, context=context)
        return handle

    def _do(self, callback: _Callback) -> None:
        if callback.process in self._stopped:
            self._stopped[callback.process].append(callback)
        elif callback.handle is None or not callback.handle.cancelled():
            callback.handle = None  # It refers back to the callback, and tests must not wait for the cycle collector.
            callback.run()

    # -- threads -----------------------------------------------------------------------------------------------------

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> "asyncio.Task[T]":
        async def work() -> T:
            await asyncio.sleep(THREAD_SECONDS)
            return func(*args)

        return self.create_task(work())


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:  # Something is ready already.
            return []
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits for something that will never happen")
            self._loop.advance(timeout)
        return ready


class LoopClock(SystemClock):
    """A clock with the running loop's time, which on an ordinary loop is the machine's."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def time(self) -> float:
        return asyncio.get_running_loop().time()


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make an asynchronous test run in virtual time, whatever else the machine does."""

    @functools.wraps(test)
    def runs(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return runs


def virtual_loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop
