"""Logs, for the user of a stage peer that serves, that rounds are committed, or why the peer has nothing to do.

It logs a few lines a minute, whatever the length of rounds.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peers.status.answer import idle_because
from swarm.machine.clock import Clock
from swarm.machine.words import Repeats, counted
from swarm.rpc.entry import where
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.training.inner_steps import InnerSteps

logger = logging.getLogger(__name__)

EVERY_SECONDS = 10.0
"""Least time between two lines about rounds."""
ACCUSED_SECONDS = 60.0
"""The shortest time between two lines about senders that have banned this peer."""
IDLE_SECONDS = 600.0
"""The shortest time between two lines that say why this peer has little to do."""
IDLE_LOOKS = 12
"""After so many looks in a row that find little to do, which take a minute, the log says so: a beginning is slow."""
MOST_ACCUSERS = 3
"""The most senders that such a line names."""
QUIET_SECONDS = 30.0
"""After this time without a microbatch, the log says so."""


@dataclass(frozen=True, kw_only=True)
class Around:
    """What a stage peer sees of the others.

    Attributes:
        endpoint: where this peer says that it can be reached.
        num_calls: how many calls, from any caller, have arrived since this peer began to serve.
        num_others: how many trainers and other peers of its stage there are. All of them would call this peer.
        has_trainer: whether there is a trainer.
        empty_stages: the other stages that no peer serves.
        left_alone_by: the senders that say that they have banned this peer, each with its reason.
    """

    endpoint: str
    num_calls: int
    num_others: int
    has_trainer: bool
    empty_stages: Sequence[int]
    left_alone_by: Mapping[str, str]

    @property
    def why_quiet(self) -> str:
        """Why no microbatch comes, as far as this peer can tell."""
        if not self.num_calls and self.num_others:
            return (
                f"no connection has reached this peer yet, though {counted(self.num_others, 'other')} would use it: "
                f"see that they reach it {where(self.endpoint)} (firewall, router, VPN), and that --announce is right"
            )
        if self.empty_stages:
            stages = ", ".join(map(str, self.empty_stages))
            return f"stage{'' if len(self.empty_stages) == 1 else 's'} {stages} without a peer"
        if not self.has_trainer:
            return "no trainer is in the run"
        return "the trainers send none to this peer"


class StageNews:
    """Chooses what is worth a line of the log, and logs it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rounds = Repeats(clock, EVERY_SECONDS)
        self._num_tasks = 0
        self._busy_at = clock.monotonic()
        self._is_quiet = False
        self._has_warned = False
        """Whether a warning about this peer's inner steps has been logged."""
        self._told_of: set[str] = set()
        """The senders that have banned this peer and are already named in the log."""
        self._accused = Repeats(clock, ACCUSED_SECONDS)
        self._idle = Repeats(clock, IDLE_SECONDS)
        self._idle_looks = 0
        """How many looks in a row have found little to do."""

    def committed(self, report: pb.RoundReport, *, samples_per_second: float, is_behind: bool) -> None:
        """Log that a round was committed here, unless this peer only applies it to catch up with its group.

        Args:
            is_behind: whether this peer is catching up; averaging logs how far it has come.
        """
        fault = InnerSteps.read(report.inner_steps).fault
        if fault and not self._has_warned:
            self._has_warned = True
            logger.warning("%s", fault)
        if is_behind or not self._rounds.count(""):
            return
        logger.info(
            "round %d committed: %s, averaged by %d of %s in %.1f s; this one manages %.3g samples/s",
            report.round, counted(report.num_samples, "sample"), report.num_members,
            counted(report.num_alive, "peer"), report.aggregate_seconds,
            samples_per_second,
        )  # fmt: skip

    def look(self, num_tasks: int, around: Around) -> None:
        """Log once if nothing has come for a while, and once if senders have banned this peer.

        Args:
            num_tasks: forwards and backwards until now.
        """
        self._look_for_accusers(around)
        now = self._clock.monotonic()
        if num_tasks != self._num_tasks:
            self._num_tasks, self._busy_at, self._is_quiet = num_tasks, now, False
        elif not self._is_quiet and now - self._busy_at >= QUIET_SECONDS:
            self._is_quiet = True
            logger.info("no microbatch for %d s: %s", QUIET_SECONDS, around.why_quiet)

    def look_at(self, shares: pb.TimeShares, around: Around) -> None:
        """Log why this peer has little to do, if it has, but not often. While a stage is empty, nothing else is the
        reason."""
        reason = "" if around.empty_stages else idle_because(shares)
        self._idle_looks = self._idle_looks + 1 if reason else 0
        if self._idle_looks >= IDLE_LOOKS and self._idle.count(""):
            logger.info("this peer is %s", reason)

    def _look_for_accusers(self, around: Around) -> None:
        """Warn of senders that say that they have banned this peer. Their claims change nothing else."""
        accusers = around.left_alone_by
        self._told_of &= accusers.keys()
        if accusers.keys() - self._told_of and self._accused.count(""):
            told = ", ".join(f"{name} ({reason})" for name, reason in sorted(accusers.items())[:MOST_ACCUSERS])
            more = f" and {len(accusers) - MOST_ACCUSERS} more" if len(accusers) > MOST_ACCUSERS else ""
            logger.warning(
                "this peer is left alone for a while by %d of its callers, as they say: %s%s. If that goes on, see "
                "that others can reach it %s", len(accusers), told, more, where(around.endpoint),
            )  # fmt: skip
            self._told_of = set(accusers)
