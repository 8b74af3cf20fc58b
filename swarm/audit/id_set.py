"""A set of nearly consecutive microbatch ids, kept as ranges: its memory depends on the number of gaps, not of ids."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class IdSet:
    """Sorted, disjoint ranges that do not touch."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        """One past the last id of each range."""
        for index in sorted(ids):
            self.add(index)

    def __len__(self) -> int:
        return sum(end - start for start, end in self.ranges())

    def __iter__(self) -> Iterator[int]:
        for start, end in self.ranges():
            yield from range(start, end)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """The first id of each range, and one past its last."""
        return zip(self._starts, self._ends, strict=True)

    def copy(self) -> "IdSet":
        same = IdSet()
        same._starts, same._ends = self._starts.copy(), self._ends.copy()
        return same

    def add(self, index: int) -> None:
        self.add_range(index, index + 1)

    def add_range(self, start: int, end: int) -> None:
        """Add all ids from `start` to just before `end`; none if that is not above it."""
        if start >= end:
            return
        low = bisect_right(self._ends, start - 1)
        high = bisect_right(self._starts, end)
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high], self._ends[low:high] = [start], [end]

    def update(self, other: "IdSet") -> None:
        for start, end in other.ranges():
            self.add_range(start, end)

    def common(self, other: "IdSet") -> "IdSet":
        found = IdSet()
        for start, end in other.ranges():
            for first, last in self._within(start, end):
                found.add_range(first, last)
        return found

    def without(self, other: "IdSet") -> "IdSet":
        left = IdSet()
        for start, end in self.ranges():
            at = start
            for first, last in other._within(start, end):
                left.add_range(at, first)
                at = last
            left.add_range(at, end)
        return left

    def _within(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of its ranges from `start` to just before `end`."""
        low, high = bisect_right(self._ends, start), bisect_left(self._starts, end)
        for first, last in zip(self._starts[low:high], self._ends[low:high], strict=True):
            yield max(start, first), min(end, last)
