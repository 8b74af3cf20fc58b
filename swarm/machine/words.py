"""Lines for people: numbers in words, text from strangers as a terminal may show it, what a line is about, and how
often one is logged.

A fault of one peer would otherwise be logged for each microbatch.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from swarm.machine.clock import Clock

_ENDINGS = (("y", "ies"), ("ch", "ches"))
"""The endings of nouns that do not simply take an s. (A y must follow a consonant.)"""
MOST_KEPT = 256
"""How many kinds of event are remembered. If there are more, the oldest are forgotten and count as new."""

ABOUT: ContextVar[str] = ContextVar("ABOUT", default="")
"""What lines of the log begin with that the present task writes: its block, where a process serves several."""


@contextmanager
def about(text: str) -> Iterator[None]:
    """Let the tasks that begin inside write lines that begin with this text."""
    token = ABOUT.set(text)
    try:
        yield
    finally:
        ABOUT.reset(token)


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as `1 peer`, `2 peers`, `1,200 microbatches`, `0 entries`."""
    if number == 1:
        return f"1 {noun}"
    for ending, plural in _ENDINGS:
        if noun.endswith(ending):
            return f"{number:,} {noun.removesuffix(ending)}{plural}"
    return f"{number:,} {noun}s"


def numbered(noun: str, numbers: Sequence[int], most: int = 8) -> str:
    """Things by their numbers, such as `path 3`, `paths 0, 1`, `paths 0, 1, 2 and 5 more`: `most` are named."""
    named = ", ".join(map(str, numbers[:most]))
    more = f" and {len(numbers) - most:,} more" if len(numbers) > most else ""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {named}{more}"


@dataclass(slots=True)
class _Kind:
    said_at: float
    num_since: int = 0


class Repeats:
    """Remembers when each kind of event was last logged."""

    def __init__(self, clock: Clock, every_seconds: float = 60.0) -> None:
        self._clock = clock
        self._every_seconds = every_seconds
        self._kinds: dict[Hashable, _Kind] = {}

    def count(self, kind: Hashable) -> int:
        """Note an event. If it is to be logged, return how many of its kind came since the last line, else 0."""
        now = self._clock.monotonic()
        known = self._kinds.get(kind)
        if known is not None and now - known.said_at < self._every_seconds:
            known.num_since += 1
            return 0
        self._kinds.pop(kind, None)
        self._kinds[kind] = _Kind(now)
        if len(self._kinds) > MOST_KEPT:
            del self._kinds[next(iter(self._kinds))]
        return 1 if known is None else known.num_since + 1


def printable(text: str, *, keep: str = "") -> str:
    """The text with a space for each unprintable character that is not in `keep`.

    Much of what programs show comes from strangers, and a terminal takes control characters for commands.
    """
    return "".join(char if char.isprintable() or char in keep else " " for char in text)
