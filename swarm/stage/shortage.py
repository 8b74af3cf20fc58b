"""What a stage peer does when its memory runs out: it takes less, and gives up where that does not help.

Used by stage/admission, which tells it of every microbatch that failed for want of memory and of every one that was
computed. Each failure halves what the peer may have in flight, and the graphs that it may keep. A microbatch that was
admitted before that may still fail, and is not counted. A peer that takes one microbatch at a time, and fails at
several in a row, gives up. Pure.

A peer never takes more again: the next failure might hit an optimizer step, and that ends a peer at once.
"""

import logging
import math

from swarm.errors import Fatal
from swarm.machine.out_of_memory import what_was_asked
from swarm.machine.words import counted
from swarm.stage.graphs import GraphBudget

logger = logging.getLogger(__name__)

TRIES = 3
"""Microbatches that may fail in a row, one at a time, before the peer gives up."""


class Shortage:
    """How much less a peer takes because its memory ran out.

    Args:
        stage: for the messages.
        budget: the budget of the peer's autograd graphs.

    Attributes:
        most_in_flight: microbatches that may be in flight.
        num_reductions: how often that was reduced. If a microbatch that began before the last reduction fails, that
            says nothing about what is allowed now.
        fault: why the peer gives up, once it does.
    """

    def __init__(self, stage: int, budget: GraphBudget) -> None:
        self.most_in_flight = math.inf
        self.num_reductions = 0
        self.fault: Fatal | None = None
        self._stage = stage
        self._budget = budget
        self._num_failures = 0

    def failed(self, error: BaseException, *, num_reductions: int, in_flight: int) -> None:
        """Note that a microbatch failed for want of memory.

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
                f"{asked}): take more stages, another --device or a machine with more memory"
            )

    def succeeded(self) -> None:
        """Note that a microbatch was computed."""
        self._num_failures = 0
