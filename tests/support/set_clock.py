"""A clock whose time of day somebody sets."""

from tests.support.manual_clock import ManualClock


class SetClock(ManualClock):
    """A clock that shows a time of day which is ahead of its monotonic time by a number of seconds."""

    ahead = 0.0

    def time(self) -> float:
        return self.monotonic() + self.ahead
