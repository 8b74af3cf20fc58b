"""The run's pace, as one peer measured it in the rounds that it committed itself.

Used by catching_up/branches, which believes a single holder only if the run can have come that far at this pace. Pure
but for the clock.
"""

from collections import deque

from swarm.averaging.messages import Standing
from swarm.machine.clock import Clock

PACE_FACTOR = 4.0
"""The highest pace that the run may have had while this peer was away, as a multiple of the pace of the fastest
round."""
PACE_ROUNDS = 4
"""The run may be ahead by this many rounds, of the largest size seen, in addition to what the pace allows."""
REMEMBERED_ROUNDS = 32
"""The pace is that of the fastest of so many last rounds, so that one burst is not remembered for ever."""


class RunPace:
    """The fastest pace that this peer has seen lately, and the time since it moved."""

    def __init__(self, own: Standing, clock: Clock) -> None:
        self._clock = clock
        self._own = own
        self._since = self._now()
        self._rounds = deque[tuple[int, float]](maxlen=REMEMBERED_ROUNDS)
        """The samples and seconds of each round."""

    def committed(self, after: Standing) -> None:
        """Note that this peer committed a round with others."""
        num_samples, seconds = after.run_samples - self._own.run_samples, max(1e-3, self._elapsed())
        self._rounds.append((num_samples, seconds))
        self.moved(after)

    def moved(self, own: Standing) -> None:
        """Note where this peer stands now, however it got there."""
        self._own, self._since = own, self._now()

    def allows(self, theirs: Standing) -> bool:
        """Whether a peer can have reached `theirs` since this peer last moved; True as long as no pace was measured."""
        if not self._is_measured:
            return True
        fastest = max(samples / seconds for samples, seconds in self._rounds)
        largest = max(samples for samples, _ in self._rounds)
        num_samples = fastest * PACE_FACTOR * self._elapsed() + PACE_ROUNDS * largest
        return theirs.run_samples - self._own.run_samples <= num_samples and self.allows_round(theirs.round)

    def allows_round(self, number: int) -> bool:
        """Whether the run can have reached a round by now; True as long as no pace was measured."""
        if not self._is_measured:
            return True
        fastest = max(1.0 / seconds for _, seconds in self._rounds)
        return number - self._own.round <= fastest * PACE_FACTOR * self._elapsed() + PACE_ROUNDS

    @property
    def _is_measured(self) -> bool:
        return any(samples for samples, _ in self._rounds)

    def _elapsed(self) -> float:
        # Some clocks stand still while a machine sleeps, and others may be set back, but the run goes on.
        return max(now - since for now, since in zip(self._now(), self._since, strict=True))

    def _now(self) -> tuple[float, float]:
        return self._clock.monotonic(), self._clock.time()
