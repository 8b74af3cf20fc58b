"""What became of a simulated stage's rounds: how each ended, and where the stage is now.

Kept by simulated_stage; its members tell it what they do. Decides nothing, but knows by the real rule when a round is
complete.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from swarm.averaging.leading.rules import is_complete
from swarm.averaging.messages import Standing
from swarm.config import AveragingConfig, Quorum, RoundsConfig, RunConfig, StagesConfig
from swarm.machine.clock import Clock
from swarm.simulation.simulated_participant import SAMPLES_PER_SECOND


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a stage is like."""

    num_members: int
    quorum: Quorum
    lifetime_seconds: float
    """Mean time until a member dies; infinite if none does."""
    round_seconds: float
    """Training until a round is complete, as long as no member dies."""
    payload_bytes: int
    """Of a contribution on the wire."""
    bytes_per_second: float
    """Of a usual member's line, either way."""


@dataclass(frozen=True, kw_only=True)
class RoundEnd:
    """How a round came to its end."""

    num_attempts: int
    """That were begun, by whichever leader."""
    seconds: float
    """From the moment a leader would have ended it to the first member's commit."""
    took_part: float
    """The members of the exchange, as a share of all that were there."""


class StageRounds:
    """The rounds of one stage.

    Attributes:
        setting: what the stage is like.
        is_complete: whether a round has the samples that it needs.
        ends: the rounds that were committed, in order.
        newest: the standing of the last of them.
        newest_members: the members that took part in it.
    """

    def __init__(self, setting: Setting, clock: Clock) -> None:
        config = RunConfig(
            stages=StagesConfig(num_stages=1),
            averaging=AveragingConfig(quorum=setting.quorum),
            rounds=RoundsConfig(round_samples=_round_samples(setting, RunConfig().data.microbatch_size)),
        )
        self.setting = setting
        self.is_complete = partial(is_complete, config)
        self.ends: list[RoundEnd] = []
        self.newest = Standing(run_samples=0, round=0, lineage="")
        self.newest_members: Collection[str] = ()
        self._clock = clock
        self._num_attempts = 0
        self._ending_since: float | None = None

    @property
    def ending_seconds(self) -> float:
        """How long the present round's end has lasted."""
        return 0.0 if self._ending_since is None else self._clock.monotonic() - self._ending_since

    def due(self) -> None:
        """A leader has all it takes to end the round, but perhaps for a quorum."""
        if self._ending_since is None:
            self._ending_since = self._clock.monotonic()

    def attempted(self) -> None:
        """A leader begins an attempt."""
        self._num_attempts += 1

    def committed(self, after: Standing, member_ids: Collection[str], *, num_present: int) -> None:
        """A member has committed a round.

        Args:
            num_present: members that live now.
        """
        if after.round <= self.newest.round:
            return
        # Some of those that took part may have died since.
        took_part = min(1.0, len(member_ids) / num_present)
        self.ends.append(RoundEnd(num_attempts=self._num_attempts, seconds=self.ending_seconds, took_part=took_part))
        self.newest, self.newest_members = after, member_ids
        self._num_attempts, self._ending_since = 0, None


def _round_samples(setting: Setting, microbatch_size: int) -> int:
    wanted = setting.num_members * setting.round_seconds * SAMPLES_PER_SECOND
    return max(1, round(wanted / microbatch_size)) * microbatch_size
