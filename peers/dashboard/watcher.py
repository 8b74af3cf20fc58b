"""Takes a view of one run at intervals, for all viewers together, and also while there are none.

Used by program.py. Each view is added to the history, and becomes the run's part of the state that is published.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Never, Protocol

from peers.dashboard.history import History
from peers.dashboard.news import Line
from peers.dashboard.run_state import about, how_to_join, present
from peers.shared.joining import Joining
from peers.status.view import SwarmView
from swarm.config import RunConfig
from swarm.errors import SwarmError
from swarm.machine.clock import Clock

logger = logging.getLogger(__name__)

SECONDS_PER_PEER = 0.01
"""The time between two views is at least this times the number of peers, because each peer that is asked costs work."""


class Place(Protocol):
    """What a watcher needs of a Lookout."""

    config: RunConfig
    joining: Joining

    async def view(self) -> SwarmView:
        """Take a view of the run now. Raises SwarmError."""
        ...


class Watcher:
    """The watcher of one run."""

    def __init__(self, place: Place, history: History, *, clock: Clock, interval_seconds: float) -> None:
        self.history = history
        self._place = place
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._seen: SwarmView | None = None
        self._state: dict[str, Any] = about(place.config) | {"fault": "", "interval_seconds": interval_seconds}

    @property
    def state(self) -> Mapping[str, Any]:
        """The run's part of the published state; a new object after each view."""
        return self._state

    @property
    def series(self) -> Mapping[str, Any]:
        """The figures over time as the page gets them when it opens; afterwards it adds new figures itself."""
        return {name: series.to_json() for name, series in self.history.series.items()}

    async def watch(self, publish: Callable[[], None]) -> Never:
        """Take views and publish after each, until cancelled. If one fails, the state says why."""
        while True:
            began = self._clock.monotonic()
            await self.look()
            publish()
            num_peers = len(self._state.get("peers", ()))
            took = self._clock.monotonic() - began
            wait = max(self._interval_seconds, SECONDS_PER_PEER * num_peers) - took
            await self._clock.sleep(max(wait, self._interval_seconds / 2))

    async def look(self) -> None:
        """Take a view, and add it to the history."""
        try:
            view = await self._place.view()
        except SwarmError as error:
            self._failed(str(error))
            return
        at = self._clock.time()
        if self._state["fault"]:
            self.history.happened(Line("good", "the run can be seen again"), at)
        figures = self.history.add(self._seen, view, at)
        self._seen = view
        self._state = self._state | present(view, self.history) | {
            "at": at,
            "figures_now": figures,
            "fault": "",
            "join": how_to_join(self._place.joining),
        }  # fmt: skip

    def _failed(self, reason: str) -> None:
        if not self._state["fault"]:
            logger.warning("the run cannot be seen, looking again: %s", reason)
            self.history.happened(Line("bad", f"the run cannot be seen: {reason}"), self._clock.time())
        self._state = self._state | {"fault": reason}
