"""The progress of a download, in words for people: its bytes so far and in all, its rate, and its sources.

Downloads report their bytes here, and machine/waits shows the words. Fetches nothing.
"""

import math
from dataclasses import dataclass, field


@dataclass(eq=False)
class Arriving:
    """The progress of one download."""

    what: str
    """Names the download, for people."""
    num_bytes: int
    """How many bytes the whole download has."""
    num_arrived: int = field(default=0, init=False)
    """How many bytes have come."""
    _spans: list[tuple[float, float]] = field(default_factory=list, init=False)
    """The spans of time in which a source was sending."""
    _num_timed: int = field(default=0, init=False)
    """How many bytes came in these spans."""
    _sources: dict[str, str] = field(default_factory=dict, init=False)
    """For each source, why it sends nothing now; empty if it sends."""

    def add(self, num_bytes: int, source: str) -> None:
        """Note that a piece has come from a source."""
        self.num_arrived += num_bytes
        self._sources[source] = ""

    def timed(self, num_bytes: int, began_at: float, ended_at: float) -> None:
        """Note that a source sent `num_bytes` without a pause; the times are seconds of any clock."""
        self._num_timed += num_bytes
        self._spans.append((began_at, ended_at))

    @property
    def bytes_per_second(self) -> float:
        """The rate while at least one source was sending; infinite if that took no measurable time."""
        return self._num_timed / self.sending_seconds if self.sending_seconds > 0.0 else math.inf

    @property
    def sending_seconds(self) -> float:
        """The seconds in which at least one source was sending; pauses, and waits for a turn, are left out."""
        total, until = 0.0, -math.inf
        for begin, end in sorted(self._spans):
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
        return total

    def held_up(self, source: str, reason: str) -> None:
        """Note that a source will send, but not yet, and why."""
        self._sources[source] = reason

    def lost(self, source: str) -> None:
        """Note that nothing comes from a source any more."""
        self._sources.pop(source, None)

    def in_words(self, seconds: float) -> str:
        """How far the download is `seconds` after it began, in words."""
        rate = self.num_arrived / max(seconds, 1e-3)
        # Segments that did not match are fetched again, so more bytes may come than the download has.
        arrived = min(self.num_arrived, self.num_bytes)
        sources = ", ".join(f"{name} ({why})" if why else name for name, why in self._sources.items())
        source = f" from {sources}" if sources else ""
        left = f", {(self.num_bytes - arrived) / rate:.0f} s left" if rate and seconds >= 1.0 else ""
        of = f"{arrived / 1e6:,.1f} of {self.num_bytes / 1e6:,.1f} MB"
        return f"{self.what}: {of}{source}, {rate / 1e6:,.2f} MB/s{left}"
