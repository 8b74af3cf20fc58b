"""Bytes that come from others, as people are told of them: how many of how many, how fast, and from whom.

Counted by downloads, and shown by waits. Fetches nothing.
"""


class Arriving:
    """One download."""

    def __init__(self, what: str, num_bytes: int) -> None:
        """
        Args:
            num_bytes: of all that is to come.
        """
        self._what = what
        self._num_bytes = num_bytes
        self._num_arrived = 0
        self._sources: dict[str, str] = {}
        """By name, why nothing comes from there now; empty for one that sends."""

    def add(self, num_bytes: int, source: str) -> None:
        """A piece is here."""
        self._num_arrived += num_bytes
        self._sources[source] = ""

    def held_up(self, source: str, reason: str) -> None:
        """Something will come from there, but not yet."""
        self._sources[source] = reason

    def lost(self, source: str) -> None:
        """Nothing comes from there any more."""
        self._sources.pop(source, None)

    def in_words(self, seconds: float) -> str:
        """How far it is, `seconds` after it began."""
        rate = self._num_arrived / max(seconds, 1e-3)
        # Segments that did not match are fetched again.
        arrived = min(self._num_arrived, self._num_bytes)
        sources = ", ".join(f"{name} ({why})" if why else name for name, why in self._sources.items())
        source = f" from {sources}" if sources else ""
        left = f", {(self._num_bytes - arrived) / rate:.0f} s left" if rate and seconds >= 1.0 else ""
        of = f"{arrived / 1e6:,.1f} of {self._num_bytes / 1e6:,.1f} MB"
        return f"{self._what}: {of}{source}, {rate / 1e6:,.2f} MB/s{left}"
