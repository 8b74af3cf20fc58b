"""How figures are judged: each bench declares in JUDGED which of its figures `compare` judges, and which way is worse.

Keys are names of figures. A dot leads to a figure inside another one, and * stands for any name (as in fnmatch). Only
figures that mean the same on another machine belong there: ratios, shares, errors and flags, but no seconds.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The direction in which a figure gets worse."""

    more_is_better: bool
    is_difference: bool = False
    """Whether the figure is a difference, which may be zero. Then a change is judged absolutely, and not relative to
    the figure."""


MORE = Judgement(more_is_better=True)
LESS = Judgement(more_is_better=False)
MORE_OF_DIFFERENCE = Judgement(more_is_better=True, is_difference=True)
