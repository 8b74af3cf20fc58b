"""Bytes that come from others, as people are told of them: how many of how many, how fast, and from whom.

Counted by downloads, and shown by waits. Fetches nothing.
"""

import math


class Arriving:
    """One download."""

    def __init__(self, what: str, num_bytes: int) -> None:
        """
        Args:
            num_bytes: the bytes of all that is to come.
        """
        self._what = what
        self._num_bytes = num_bytes
        self.num_arrived = 0
        """Bytes that are here."""
        self._spans = list[tuple[float, float]]()
        """When a source was sending."""
        self._num_timed = 0
        """Bytes that came then."""
        self._sources: dict[str, str] = {}
        """By name, why nothing comes from there now; empty for one that sends."""

    def add(self, num_bytes: int, source: str) -> None:
        """A piece is here."""
        self.num_arrived += num_bytes
        self._sources[source] = ""

    def timed(self, num_bytes: int, began_at: float, ended_at: float) -> None:
        """A source sent so many bytes in a row; the times are seconds of any clock."""
        self._num_timed += num_bytes
        self._spans.append((began_at, ended_at))

    @property
    def bytes_per_second(self) -> float:
        """While at least one source was sending: infinite where that took no time that could be seen."""
        return self._num_timed / self.sending_seconds if self.sending_seconds > 0.0 else math.inf

    @property
    def sending_seconds(self) -> float:
        """In which at least one source was sending: its pauses, and the turns of others, are left out."""
        total, until = 0.0, -math.inf
        for begin, end in sorted(self._spans):
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
        return total

    def held_up(self, source: str, reason: str) -> None:
        """Something will come from there, but not yet."""
        self._sources[source] = reason

    def lost(self, source: str) -> None:
        """Nothing comes from there any more."""
        self._sources.pop(source, None)

    def in_words(self, seconds: float) -> str:
        """How far it is, `seconds` after it began."""
        rate = self.num_arrived / max(seconds, 1e-3)
        # Segments that did not match are fetched again.
        arrived = min(self.num_arrived, self._num_bytes)
        sources = ", ".join(f"{name} ({why})" if why else name for name, why in self._sources.items())
        source = f" from {sources}" if sources else ""
        left = f", {(self._num_bytes - arrived) / rate:.0f} s left" if rate and seconds >= 1.0 else ""
        of = f"{arrived / 1e6:,.1f} of {self._num_bytes / 1e6:,.1f} MB"
        return f"{self._what}: {of}{source}, {rate / 1e6:,.2f} MB/s{left}"
