"""One trainer's figures of each step: losses, targets, and the time in which microbatches were under way. Pure."""

from dataclasses import dataclass, field
from fractions import Fraction

from swarm.machine.clock import Clock


@dataclass
class StepTotals:
    """One trainer's figures since the last step.

    Attributes:
        losses: the mean loss and the number of targets of each microbatch that counts for the step's round.
    """

    losses: list[tuple[float, int]] = field(default_factory=list)
    busy_seconds: float = 0.0
    """Seconds in which microbatches were under way."""
    num_targets: int = 0
    num_microbatches: int = 0
    num_rerouted: int = 0

    @property
    def loss(self) -> float | None:
        """The mean loss over the targets; None if there are none."""
        num_targets = sum(count for _, count in self.losses)
        if not num_targets:
            return None
        # Peers may report any finite number. The exact mean of such numbers is finite, but a sum of floats may not be.
        return float(sum(Fraction(loss) * count for loss, count in self.losses) / num_targets)


class Tally:
    """The totals of the step that is under way."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._totals = StepTotals()
        self._losses: dict[int, dict[int, tuple[float, int]]] = {}
        """The losses by round and microbatch. A microbatch that is run again because a peer died still has one loss."""
        self._counted_until = clock.monotonic()

    def time_passed(self, *, is_busy: bool) -> None:
        """Count the time since the last call; `is_busy` says whether microbatches were under way in it.

        It has to be called before a microbatch begins or ends.
        """
        now = self._clock.monotonic()
        if is_busy:
            self._totals.busy_seconds += now - self._counted_until
        self._counted_until = now

    def answered(self, round_number: int, microbatch: int, loss: float, *, num_targets: int, is_rerouted: bool) -> None:
        """Count a microbatch that was answered for a round, unless it has been counted for that round before."""
        losses = self._losses.setdefault(round_number, {})
        if microbatch in losses:
            return
        losses[microbatch] = loss, num_targets
        self._totals.num_targets += num_targets
        self._totals.num_microbatches += 1
        self._totals.num_rerouted += is_rerouted

    @property
    def num_microbatches(self) -> int:
        """The microbatches that were counted since the last step."""
        return self._totals.num_microbatches

    def take(self, round_number: int) -> StepTotals:
        """Return the totals of the step that ends with this round, and begin those of the next step.

        Losses are divided by round, not by time, since the next round may be under way already.
        """
        totals, self._totals = self._totals, StepTotals()
        for known in [known for known in self._losses if known <= round_number]:
            totals.losses += self._losses.pop(known).values()
        return totals
