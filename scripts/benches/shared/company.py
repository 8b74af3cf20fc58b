"""How busy this machine was with other work while something was measured.

Used by menu.py and by chaos, which put it beside their figures: a speed that was measured beside other work says
little.
"""

import os

from scripts.benches.shared import proc
from scripts.benches.shared.common import say

SAY_ABOVE = 0.1
"""The share of the cores' time above which a line says so."""


class Company:
    """The other processes of this machine, from the moment when this is made."""

    def __init__(self) -> None:
        self._began = _busy_and_all()

    def share(self) -> float | None:
        """The share of all cores' time since then that other processes used: all but this one and its children, dead
        ones included. None where the system does not tell. More than a little is said as well."""
        ended = _busy_and_all()
        if self._began is None or ended is None or ended[1] <= self._began[1]:
            return None
        share = max(0.0, round((ended[0] - self._began[0]) / (ended[1] - self._began[1]), 3))
        if share > SAY_ABOVE:
            say(f"other processes used {share:.0%} of this machine's cores meanwhile: speeds may be too low")
        return share


def _busy_and_all() -> tuple[float, float] | None:
    """The ticks for which cores were busy with other processes so far, and all ticks."""
    try:
        idle, everything = proc.idle_and_all_ticks()
        own = proc.cpu_seconds_of_all(os.getpid()) * os.sysconf("SC_CLK_TCK")
    except OSError:
        return None
    return everything - idle - own, everything
