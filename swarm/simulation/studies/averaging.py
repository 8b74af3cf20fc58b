"""How a stage's rounds end while members die: attempts, seconds, and the share that takes part.

    scripts/simulate averaging --json

From three members to a thousand, with the real rule for a group (swarm/simulation/simulated_stage.py tells what of it).
Failures come at the rates of the CheckFree paper (arXiv 2506.15461): in each iteration, here a round's training, every
member dies with probability 0.2, 0.4 or 1 %; or after a given time in the mean.
"""

import random
import statistics
from dataclasses import dataclass
from typing import Any, get_args

from swarm.averaging.timing import Timing
from swarm.config import Quorum
from swarm.simulation.simulated_stage import SimulatedStage
from swarm.simulation.stage_rounds import RoundEnd, Setting
from swarm.simulation.study import ChanceOptions
from swarm.simulation.timeline import Timeline

MOST_ROUNDS = 200
BYTES_PER_MEGABIT = 125_000
SLOWEST_MEGABITS_PER_SECOND = Timing().bytes_per_second / BYTES_PER_MEGABIT
"""Members wait for a line that is no slower; giving up on a slower one is not simulated."""


@dataclass(frozen=True, kw_only=True)
class Options(ChanceOptions):
    """How a stage's rounds end while members die."""

    num_members: tuple[int, ...] = (3, 10, 100, 1000)
    """Sizes of the stage."""
    failure_percent: tuple[float, ...] = (0.2, 0.4, 1.0)
    """Of the members, that die in an iteration: while a round is trained."""
    lifetime_hours: tuple[float, ...] = ()
    """Mean times until a member dies, instead of failure_percent."""
    round_seconds: float = 60.0
    """Training until a round is complete, as long as no member dies."""
    payload_megabytes: float = 32.0
    """Of a contribution on the wire."""
    megabits_per_second: float = 100.0
    """Of a usual member's line, either way."""
    bound_seconds: float = 60.0
    """Within which a round's end is to be over."""
    num_contributions: int = 10000
    """Rounds times members that are simulated of each setting, about; but at most 200 rounds."""

    def __post_init__(self) -> None:
        if not self.num_members or min(self.num_members) < 1:
            raise ValueError("--num-members takes one or more numbers from 1 on")
        if not self.failure_percent or not all(0 <= percent <= 100 for percent in self.failure_percent):
            raise ValueError("--failure-percent takes one or more numbers from 0 to 100")
        if not all(hours > 0 for hours in self.lifetime_hours):
            raise ValueError("--lifetime-hours takes numbers that are more than 0")
        for name in ("round_seconds", "payload_megabytes", "bound_seconds", "num_contributions"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0")
        if not self.megabits_per_second >= SLOWEST_MEGABITS_PER_SECOND:
            raise ValueError(f"--megabits-per-second must be at least {SLOWEST_MEGABITS_PER_SECOND:.0f}")

    @property
    def lifetimes(self) -> dict[str, float]:
        """In seconds, by the name of the setting."""
        if self.lifetime_hours:
            return {f"{hours:g} h": 3600.0 * hours for hours in self.lifetime_hours}
        return {
            f"{percent:g} %": 100.0 * self.round_seconds / percent if percent else float("inf")
            for percent in self.failure_percent
        }


def run(options: Options) -> dict[str, Any]:
    """The study's figures: of every size and rate, those of both quorums."""
    return {
        "settings": [
            {
                "num_members": size,
                "failures": name,
                **{quorum: _one(options, size, lifetime, quorum) for quorum in get_args(Quorum)},
            }
            for size in options.num_members
            for name, lifetime in options.lifetimes.items()
        ]
    }


def _one(options: Options, size: int, lifetime_seconds: float, quorum: Quorum) -> dict[str, float | None]:
    timeline = Timeline()
    setting = Setting(
        num_members=size,
        quorum=quorum,
        lifetime_seconds=lifetime_seconds,
        round_seconds=options.round_seconds,
        payload_bytes=round(options.payload_megabytes * 1e6),
        bytes_per_second=options.megabits_per_second * BYTES_PER_MEGABIT,
    )
    stage = SimulatedStage(timeline, random.Random(options.seed), setting)
    num_rounds = min(MOST_ROUNDS, max(1, options.num_contributions // size))
    end = num_rounds * (options.round_seconds + options.bound_seconds)
    rounds = stage.rounds
    while len(rounds.ends) < num_rounds and timeline.monotonic() < end:
        timeline.run(timeline.monotonic() + options.round_seconds)
    return figures(rounds.ends, pending_seconds=rounds.ending_seconds, bound_seconds=options.bound_seconds)


def figures(ends: list[RoundEnd], *, pending_seconds: float, bound_seconds: float) -> dict[str, float | None]:
    """What came of the rounds.

    Args:
        pending_seconds: how long one has been ending that was not committed; beyond the bound it counts among them.
    """
    num_rounds = len(ends) + (pending_seconds > bound_seconds)
    seconds = sorted(end.seconds for end in ends)
    return {
        "num_rounds": num_rounds,
        "rounds_committed_share": _mean([end.seconds <= bound_seconds for end in ends], num_rounds),
        "first_attempt_share": _mean([end.num_attempts == 1 for end in ends], num_rounds),
        "attempts_per_round": _mean([end.num_attempts for end in ends], len(ends)),
        "p50_seconds": statistics.median(seconds) if ends else None,
        "p90_seconds": seconds[int(0.9 * (len(seconds) - 1))] if ends else None,
        "took_part_share": _mean([end.took_part for end in ends], len(ends)),
    }


def _mean(values: list[float] | list[bool] | list[int], number: int) -> float | None:
    return sum(values) / number if number else None
