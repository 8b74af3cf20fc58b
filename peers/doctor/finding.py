"""What an examination finds, of one thing each.

Programs read it before they import torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    FINE = "fine"
    WRONG = "wrong"
    NOT_CHECKED = "not checked"
    """The finding's text says why it was not checked."""


@dataclass(frozen=True)
class Finding:
    """What was found out about one thing, which has a name of a word or two; if it is wrong, also what to change."""

    what: str
    state: State
    text: str

    def __str__(self) -> str:
        return f"{self.what:<10}  {self.state:<11}  {self.text}"


def fine(what: str, text: str) -> Finding:
    return Finding(what, State.FINE, text)


def wrong(what: str, text: str) -> Finding:
    return Finding(what, State.WRONG, text)


def not_checked(what: str, text: str) -> Finding:
    return Finding(what, State.NOT_CHECKED, text)


def is_well(findings: Iterable[Finding]) -> bool:
    return all(finding.state is not State.WRONG for finding in findings)
