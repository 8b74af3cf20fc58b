"""A clock whose time of day somebody sets."""

from swarm.machine.clock import ManualClock


class SetClock(ManualClock):
    """Its time of day is ahead of its monotonic time by so many seconds."""

    ahead = 0.0

    def time(self) -> float:
        return self.monotonic() + self.ahead
