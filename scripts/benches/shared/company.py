"""Measures how busy this machine is with other work while a bench runs.

Used by menu.py and by chaos, which add it to their figures: a speed that was measured beside other work means little.
"""

import os

from scripts.benches.shared import proc
from scripts.benches.shared.common import say

SAY_ABOVE = 0.1
"""If other processes use more than this share of the cores' time, a line says so."""


class Company:
    """The other processes of this machine, observed from the moment when this object is made."""

    def __init__(self) -> None:
        self._began = _busy_and_all()

    def share(self) -> float | None:
        """The share of all cores' time since then that other processes used. This process and its children, dead ones
        included, do not count. None if the system does not say. Prints a line if it is above SAY_ABOVE."""
        ended = _busy_and_all()
        if self._began is None or ended is None or ended[1] <= self._began[1]:
            return None
        share = max(0.0, round((ended[0] - self._began[0]) / (ended[1] - self._began[1]), 3))
        if share > SAY_ABOVE:
            say(f"other processes used {share:.0%} of this machine's cores meanwhile: speeds may be too low")
        return share


def _busy_and_all() -> tuple[float, float] | None:
    """The ticks for which the cores have been busy with other processes until now, and all ticks."""
    try:
        idle, everything = proc.idle_and_all_ticks()
        own = proc.cpu_seconds_of_all(os.getpid()) * os.sysconf("SC_CLK_TCK")
    except OSError:
        return None
    return everything - idle - own, everything
