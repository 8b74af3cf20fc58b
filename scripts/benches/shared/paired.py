"""Sides that take turns, and are compared repetition by repetition; and processes that have the machine to themselves.

Other work on a machine comes and goes. Two turns of one repetition are disturbed about equally, but the medians of two
sides are not. So a ratio is the median of the ratios of all repetitions.
"""

import contextlib
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from peers.local.supervisor import Child, Supervisor
from scripts.benches.shared.common import POLL_SECONDS, START_SECONDS, fail_on_exit, say, wait_for_json, write_json
from swarm.errors import DeadlineExceeded

Side = TypeVar("Side")

Turns = Mapping[str, Sequence[float]]  # The values of each side's turns, one for each repetition


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The ratio of one side to another."""

    median: float  # The median of the repetitions' ratios
    extremes: tuple[float, float]  # The least and the largest of the repetitions' ratios


def in_turns(
    sides: Mapping[str, Callable[[int], float]], repetitions: int, *, what: str = "", unit: str = "s"
) -> dict[str, list[float]]:
    """Let each side have its turn in every repetition, in the opposite order in every second one. A side gets the
    repetition's number, and returns the measured value. `what` names the comparison in lines of progress, if any."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repetitions):
        for name in order(list(sides), number):
            values[name].append(sides[name](number))
        latest = ", ".join(f"{name} {_rounded(turns[-1])} {unit}" for name, turns in values.items())
        if what:
            say(f"{what}, {number + 1} of {repetitions}: {latest}")
    return values


def order(sides: Sequence[Side], number: int) -> Sequence[Side]:
    return sides if number % 2 == 0 else sides[::-1]


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    ratios = [one / other for one, other in zip(over, under, strict=True)]
    return Ratio(median=statistics.median(ratios), extremes=(min(ratios), max(ratios)))


def medians(turns: Turns) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in turns.items()}


def figures(ratios: Mapping[str, Ratio | Mapping[str, Ratio]]) -> dict[str, Any]:
    """Ratios as a bench reports them: each ratio by its name, and the extremes of all ratios as `ratio_range`."""
    return {
        **{name: _each(found, lambda one: one.median) for name, found in ratios.items()},
        "ratio_range": {name: _each(found, lambda one: list(one.extremes)) for name, found in ratios.items()},
    }


def _each(found: Ratio | Mapping[str, Ratio], value: Callable[[Ratio], Any]) -> Any:
    return value(found) if isinstance(found, Ratio) else {name: value(one) for name, one in found.items()}


TURN_SECONDS = 24 * 3600.0
"""Longest turn. It is long because a user may ask for any amount of work. If the process dies, this is noticed at
once."""


def take_turns(results: Path, work: Callable[[], float | None]) -> None:
    """Do `work` each time this process is continued, until it is killed. The seconds of turn N are written to
    `results`/N.json: those that `work` returns, or those that it took."""
    for turn in itertools.count():
        signal.raise_signal(signal.SIGSTOP)
        start = time.perf_counter()
        seconds = work()
        if seconds is None:
            seconds = time.perf_counter() - start
        write_json(results / f"{turn}.json", {"seconds": seconds})


class Worker:
    """A process that takes turns, and is stopped between them."""

    def __init__(self, name: str, command: Sequence[str], results: Path, children: Supervisor) -> None:
        """Start the process, which must call `take_turns` with the folder `results`."""
        self._children = children
        self._results = results
        self._results.mkdir(parents=True)
        self._turn = 0
        self._child: Child = children.start(name, command)

    def until_stopped(self) -> None:
        """Wait until the process has stopped: after its start, or when its turn is over. Raises PeerUnavailable and
        DeadlineExceeded."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            # If the process has ended, it can no longer stop, and waitid raises an error.
            with contextlib.suppress(ChildProcessError):
                if os.waitid(os.P_PID, self._child.pid, os.WSTOPPED | os.WNOHANG) is not None:
                    return
            fail_on_exit(self._children)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{self._child.name} is not ready after {START_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)

    def begin(self) -> None:
        os.kill(self._child.pid, signal.SIGCONT)

    def seconds(self) -> float:
        """Wait for the end of the turn, for TURN_SECONDS at most, and return its seconds. Raises what `until_stopped`
        raises."""
        result = wait_for_json(self._results / f"{self._turn}.json", self._children, timeout_seconds=TURN_SECONDS)
        self._turn += 1
        self.until_stopped()
        return float(result["seconds"])


def turn_seconds(workers: Sequence[Worker]) -> list[float]:
    """Let these processes have their turn at once, and return the seconds of each. Raises as `seconds` does."""
    for worker in workers:
        worker.begin()
    return [worker.seconds() for worker in workers]
