"""What a bench's figures are judged by: each bench declares in JUDGED which of them `compare` looks at, and how.

Keys are names of figures, those within others after a dot, with * for whatever comes there (fnmatch's). Only what holds
on another machine belongs there: ratios, shares, errors and flags, but no seconds.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Which way a figure gets worse."""

    more_is_better: bool
    is_difference: bool = False
    """Whether it may be zero: then a change counts as it is, and not relative to the figure."""


MORE = Judgement(more_is_better=True)
LESS = Judgement(more_is_better=False)
MORE_OF_DIFFERENCE = Judgement(more_is_better=True, is_difference=True)
