"""What one trainer has seen of each step: losses, targets, and how long microbatches were under way. Pure."""

from dataclasses import dataclass, field
from fractions import Fraction

from swarm.machine.clock import Clock


@dataclass
class StepTotals:
    """What one trainer has seen since the last step.

    Attributes:
        losses: of the microbatches that were admitted to the step's round: the mean of each, and its targets.
    """

    losses: list[tuple[float, int]] = field(default_factory=list)
    busy_seconds: float = 0.0
    """Seconds in which microbatches were under way."""
    num_targets: int = 0
    num_microbatches: int = 0
    num_rerouted: int = 0

    @property
    def loss(self) -> float | None:
        """Mean over the targets; None without any."""
        num_targets = sum(count for _, count in self.losses)
        if not num_targets:
            return None
        # Peers may report anything that is finite; the exact mean of that is finite too, where a sum may not be.
        return float(sum(Fraction(loss) * count for loss, count in self.losses) / num_targets)


class Tally:
    """The totals of the step that is under way."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._totals = StepTotals()
        self._losses: dict[int, dict[int, tuple[float, int]]] = {}
        """The losses by round and microbatch. A microbatch that is run again, since a peer died with it, has one loss
        all the same."""
        self._counted_until = clock.monotonic()

    def time_passed(self, *, is_busy: bool) -> None:
        """Call this before anything changes: were microbatches under way since the last change?"""
        now = self._clock.monotonic()
        if is_busy:
            self._totals.busy_seconds += now - self._counted_until
        self._counted_until = now

    def answered(self, round_number: int, microbatch: int, loss: float, *, num_targets: int, is_rerouted: bool) -> None:
        """A microbatch was answered that counts for a round, unless it was before."""
        losses = self._losses.setdefault(round_number, {})
        if microbatch in losses:
            return
        losses[microbatch] = loss, num_targets
        self._totals.num_targets += num_targets
        self._totals.num_microbatches += 1
        self._totals.num_rerouted += is_rerouted

    def take(self, round_number: int) -> StepTotals:
        """The totals of the step that ends with this round; those of the next one begin.

        Losses go by round, not by time: the next round may be under way already.
        """
        totals, self._totals = self._totals, StepTotals()
        for known in [known for known in self._losses if known <= round_number]:
            totals.losses += self._losses.pop(known).values()
        return totals
