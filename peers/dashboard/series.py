"""Figures over time, as means over spans of equal length. The number of spans is bounded, however long a run lasts.

Kept by history.py, at three lengths of spans.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Series:
    """The newest spans of a fixed length. If it `coarsens`, it keeps all spans instead, and doubles their length
    whenever there are too many.

    Attributes:
        span_seconds: length of a span.
        at: when each span began, in seconds since the epoch.
        columns: for each figure, its mean in each span; None if it was not known.
        counts: how many values of each figure are in the last span's mean.
    """

    span_seconds: float
    max_spans: int
    coarsens: bool = False
    at: list[float] = field(default_factory=list)
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.span_seconds <= 0 or self.max_spans < 2 or any(len(c) != len(self.at) for c in self.columns.values()):
            raise ValueError(
                "a series needs a span length above 0, room for two spans, and as many values of a figure as spans"
            )

    def add(self, at: float, values: Mapping[str, float | None]) -> None:
        """Add the values of a moment. They count for the last span even if the clock was set back to a time before
        it."""
        began = at - at % self.span_seconds
        if not self.at or began > self.at[-1]:
            self.at.append(began)
            self.counts = {}
            for column in self.columns.values():
                column.append(None)
        for name, value in values.items():
            column = self.columns.setdefault(name, [None] * len(self.at))
            if value is not None:
                count = self.counts[name] = self.counts.get(name, 0) + 1
                before = column[-1]
                column[-1] = value if before is None else before + (value - before) / count
        while len(self.at) > self.max_spans:
            self._make_room()

    def _make_room(self) -> None:
        if not self.coarsens:
            del self.at[0]
            for column in self.columns.values():
                del column[0]
            return
        self.span_seconds *= 2
        groups: dict[float, list[int]] = {}
        for index, began in enumerate(self.at):
            groups.setdefault(began - began % self.span_seconds, []).append(index)
        self.at = list(groups)
        self.columns = {
            name: [_mean([column[index] for index in group]) for group in groups.values()]
            for name, column in self.columns.items()
        }

    def to_json(self) -> dict[str, object]:
        """The series as the page draws it."""
        return {"span_seconds": self.span_seconds, "at": self.at, "columns": self.columns}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
