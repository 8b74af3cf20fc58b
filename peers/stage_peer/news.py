"""What a stage peer tells its user while it serves: that rounds are committed, or that there is nothing to do.

Called by server.py. A few lines a minute, whatever the length of rounds.
"""

import logging
import math

from swarm.machine.clock import Clock
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.training.inner_steps import InnerSteps

logger = logging.getLogger(__name__)

EVERY_SECONDS = 10.0
"""Least time between two lines about rounds."""
QUIET_SECONDS = 30.0
"""Without a microbatch, after which it is said that none comes."""


class StageNews:
    """Says what is worth a line of the log."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said_at = -math.inf
        self._num_tasks = 0
        self._busy_at = clock.monotonic()
        self._is_quiet = False
        self._has_warned = False
        """Of how this peer learns."""

    def committed(self, report: pb.RoundReport, *, samples_per_second: float, is_behind: bool) -> None:
        """A round was committed here. Of one that was replayed nothing is said: this peer had no part in it.

        Args:
            samples_per_second: what this peer manages.
            is_behind: whether it is on its way to its group; how far that is, averaging says.
        """
        fault = InnerSteps.read(report.inner_steps).fault
        if fault and not self._has_warned:
            self._has_warned = True
            logger.warning("%s", fault)
        now = self._clock.monotonic()
        if is_behind or now - self._said_at < EVERY_SECONDS:
            return
        self._said_at = now
        logger.info(
            "round %d committed: %d samples, averaged by %d of %d peers in %.1f s; this one manages %.3g samples/s",
            report.round, report.num_samples, report.num_members, report.num_alive, report.aggregate_seconds,
            samples_per_second,
        )  # fmt: skip

    def look(self, num_tasks: int) -> None:
        """Say, once each time, that nothing has come for a while.

        Args:
            num_tasks: forwards and backwards until now.
        """
        now = self._clock.monotonic()
        if num_tasks != self._num_tasks:
            self._num_tasks, self._busy_at, self._is_quiet = num_tasks, now, False
        elif not self._is_quiet and now - self._busy_at >= QUIET_SECONDS:
            self._is_quiet = True
            logger.info(
                "no microbatch for %d s: nobody trains, or another stage has no peer (swarm-status shows who is there)",
                QUIET_SECONDS,
            )
