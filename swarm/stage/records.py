"""A stage peer's records of its microbatches: the ledger, counters, and the answers under way.

Made by stage/stage for all parts of one peer. Decides nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from swarm.routing.throughput import MovingAverage
from swarm.stage.computation import Computation
from swarm.stage.ledger import Ledger


class Answers:
    """Answers on their way back, until their acknowledgement is passed on.

    Attributes:
        num_written: tensors of answers that are being written. Writing waits when the line is full.
        num_unacknowledged: calls that have their answer, and have not acknowledged it yet.
        num_settling: tasks that still carry out the consequences of acknowledgements.
    """

    def __init__(self) -> None:
        self.num_written = 0
        self.num_unacknowledged = 0
        self.num_settling = 0

    @property
    def are_under_way(self) -> bool:
        """Whether acknowledgements are still to come or to be carried out, so that they would be lost with this
        peer."""
        return self.num_unacknowledged > 0 or self.num_settling > 0

    @contextmanager
    def written(self, num_tensors: int) -> Iterator[None]:
        """Count an answer's tensors as being written while the block runs."""
        self.num_written += num_tensors
        try:
            yield
        finally:
            self.num_written -= num_tensors

    @contextmanager
    def unacknowledged(self) -> Iterator[None]:
        """Count an acknowledgement as outstanding while the block runs."""
        self.num_unacknowledged += 1
        try:
            yield
        finally:
            self.num_unacknowledged -= 1

    def settle(self, consequence: "asyncio.Task[None]") -> None:
        """Count a task that carries out an acknowledgement, until the task ends. The acknowledgement's sender does not
        wait for it."""
        self.num_settling += 1
        consequence.add_done_callback(self._settled)

    def _settled(self, _: "asyncio.Task[None]") -> None:
        self.num_settling -= 1


@dataclass(frozen=True)
class Records:
    """All records of one stage."""

    ledger: Ledger[Computation] = field(default_factory=Ledger)
    counters: Counter[str] = field(default_factory=Counter)
    """What has happened since the peer started, by the names that StageCounters has on the wire."""
    answers: Answers = field(default_factory=Answers)
    seconds_per_sample: MovingAverage = field(default_factory=lambda: MovingAverage(0.1))
    """The compute thread's time for one sample, forward and backward."""
