"""What a member of a block's round holds against other members: its complaints, which it signs with the tally.

It says what the member itself, as the owner of a part, found out of line in the last rounds, and whom it names as a
liar. One member's complaints prove nothing. Whom most members of a round name is named (tally.named_by).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from swarm.machine.words import printable
from swarm.types import LARGEST_COUNT

FEW_ACCUSERS = 2
"""An accusation by so many, or fewer, may be false."""
MOST_WORDS, MOST_NAMED = 12, 8
"""The most words in one member's complaints, and the most that it names: the newest."""
LONGEST_LINE = 400
LONGEST_COMPLAINTS = 10_000
"""The most characters of their text."""
_LONGEST_ID = 64


class Word(NamedTuple):
    """A member's word that in a round another member's contribution was out of line from `start` to `stop`, which was
    the part of the vector that it owned."""

    peer_id: str
    round: int
    start: int
    stop: int
    reason: str


class Named(NamedTuple):
    """Why a member is named.

    Attributes:
        round: the last one in which it lied.
        line: what is known against it.
        accuses_falsely: false; releases that speak protocol 12 may name an owner for its words about others.
    """

    round: int
    line: str
    accuses_falsely: bool = False


@dataclass(frozen=True, kw_only=True)
class Complaints:
    """One member's complaints; those that it names are named by their ids."""

    words: tuple[Word, ...] = ()
    named: Mapping[str, Named] = field(default_factory=dict)

    def to_text(self) -> str:
        """As JSON; empty if nothing is said. What is beyond the bounds is left out."""
        words = sorted(self.words, key=lambda word: -word.round)[:MOST_WORDS]
        newest = sorted(self.named.items(), key=lambda item: (-item[1].round, item[0]))[:MOST_NAMED]
        named = {peer_id: each._replace(line=each.line[:LONGEST_LINE]) for peer_id, each in newest}
        if not words and not named:
            return ""
        text = json.dumps({"words": words, "named": named}, ensure_ascii=False, separators=(",", ":"))
        return text if len(text) <= LONGEST_COMPLAINTS else Complaints(named=named).to_text()

    @classmethod
    def read(cls, text: str) -> Self:
        """The inverse of `to_text`. A text that is none says nothing."""
        try:
            values = json.loads(text[: LONGEST_COMPLAINTS + 1])
            return cls(
                words=tuple(
                    Word(_id(peer), _count(number), _count(start), _count(stop), _line(reason))
                    for peer, number, start, stop, reason in values["words"][:MOST_WORDS]
                ),
                named={
                    _id(peer): Named(_count(number), _line(line), bool(accuses))
                    for peer, (number, line, accuses) in list(values["named"].items())[:MOST_NAMED]
                },
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return cls()


def _id(value: str) -> str:
    if not 0 < len(value) <= _LONGEST_ID:
        raise ValueError
    return printable(value)


def _count(value: int) -> int:
    if not 0 <= value <= LARGEST_COUNT:
        raise ValueError
    return int(value)


def _line(value: str) -> str:
    return printable(value[:LONGEST_LINE])
