"""Reacts when a stage peer's memory runs out: the peer takes fewer microbatches, and gives up if that does not help.

stage/admission reports every microbatch that failed for lack of memory, and every one that was computed. Each failure
halves the microbatches that the peer may have in flight, and the graphs that it may keep. If a microbatch that was
admitted before then fails too, that is not counted. A peer that takes one microbatch at a time, and fails at several in
a row, gives up. Pure.

A peer never takes more again, because the next failure might be in an optimizer step, which ends the peer at once.
"""

import logging
import math

from swarm.errors import Fatal
from swarm.machine.out_of_memory import SMALLER, what_was_asked
from swarm.machine.words import counted
from swarm.stage.graphs import GraphBudget

logger = logging.getLogger(__name__)

TRIES = 3
"""Microbatches that may fail in a row, one at a time, before the peer gives up."""


class Shortage:
    """The reduced limits of a peer whose memory ran out.

    Args:
        stage: for the messages.
        budget: the budget of the peer's autograd graphs.

    Attributes:
        most_in_flight: microbatches that may be in flight.
        num_reductions: how often that number was reduced. If a microbatch that began before the last reduction fails,
            this says nothing about the present limit.
        fault: the reason why the peer gives up; None before that.
    """

    def __init__(self, stage: int, budget: GraphBudget) -> None:
        self.most_in_flight = math.inf
        self.num_reductions = 0
        self.fault: Fatal | None = None
        self._stage = stage
        self._budget = budget
        self._num_failures = 0

    def failed(self, error: BaseException, *, num_reductions: int, in_flight: int) -> None:
        """Note that a microbatch failed for lack of memory.

        Args:
            num_reductions: the number of reductions when the microbatch was admitted.
            in_flight: microbatches in flight, that one included.
        """
        if num_reductions < self.num_reductions or self.fault is not None:
            return
        asked = what_was_asked(error)
        if self.most_in_flight > 1:
            self.most_in_flight = max(1, min(in_flight, self.most_in_flight) // 2)
            self.num_reductions += 1
            self._budget.halve()
            logger.warning(
                "out of memory (no room for %s, %d in flight): this peer takes %s at most from now on",
                asked,
                in_flight,
                counted(int(self.most_in_flight), "microbatch"),
            )
            return
        self._num_failures += 1
        if self._num_failures >= TRIES:
            self.fault = Fatal(
                f"stage {self._stage} ran out of memory at {TRIES} microbatches in a row, one at a time (no room for "
                f"{asked}): the run needs {SMALLER} or more stages, or this peer another --device or more memory"
            )

    def succeeded(self) -> None:
        """Note that a microbatch was computed."""
        self._num_failures = 0
