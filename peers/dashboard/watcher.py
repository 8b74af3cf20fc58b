"""Looks at one run again and again, for all viewers at once, whether there are any or not.

Used by program.py. What it has seen goes into the history, and is told to the part that publishes it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never, Protocol

from peers.dashboard.history import History, to_json
from peers.dashboard.news import Line
from peers.dashboard.run_state import about, present
from peers.status.view import SwarmView
from swarm.config import RunConfig
from swarm.errors import SwarmError
from swarm.machine.clock import Clock
from swarm.types import PeerRecord

logger = logging.getLogger(__name__)

SECONDS_PER_PEER = 0.01
"""The time between two looks is at least this for each peer, since looking at many peers costs this machine more."""

Records = Mapping[int, Sequence[PeerRecord]]


class Place(Protocol):
    """A run as a watcher sees it; see Lookout."""

    config: RunConfig

    @property
    def records(self) -> Records:
        """What was announced at each stage, as the last view saw it."""
        ...

    async def view(self) -> SwarmView:
        """The run now. Raises SwarmError."""
        ...


class Watcher:
    """The watcher of one run."""

    def __init__(
        self, place: Place, history: History, *, clock: Clock, interval_seconds: float,
        how_to_join: Callable[[RunConfig, Records], Mapping[str, str]],
    ) -> None:  # fmt: skip
        """
        Args:
            how_to_join: the lines with which others come to the run, by what they do there.
        """
        self.history = history
        self._place = place
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._how_to_join = how_to_join
        self._seen: SwarmView | None = None
        self._fault = ""
        self._state: dict[str, Any] = about(place.config) | {"fault": "", "interval_seconds": interval_seconds}

    @property
    def state(self) -> Mapping[str, Any]:
        """What the page is told of the run; a new object after each look."""
        return self._state

    @property
    def series(self) -> Mapping[str, Any]:
        """The figures over time, as the history has them."""
        return to_json(self.history)

    async def watch(self, publish: Callable[[], None]) -> Never:
        """Look until cancelled, and publish after each look. One that fails is told, and the next one follows."""
        while True:
            began = self._clock.monotonic()
            await self.look()
            publish()
            num_peers = len(self._state.get("peers", ()))
            took = self._clock.monotonic() - began
            wait = max(self._interval_seconds, SECONDS_PER_PEER * num_peers) - took
            await self._clock.sleep(max(wait, self._interval_seconds / 2))

    async def look(self) -> None:
        """Look once, and add what is seen to the history."""
        try:
            view = await self._place.view()
        except SwarmError as error:
            self._failed(str(error))
            return
        at = self._clock.time()
        if self._fault:
            self.history.happened(Line("good", "the run can be seen again"), at)
            self._fault = ""
        figures = self.history.add(self._seen, view, at)
        self._seen = view
        self._state = self._state | present(view, self.history) | {
            "at": at,
            "figures_now": figures,
            "fault": "",
            "join": dict(self._how_to_join(self._place.config, self._place.records)),
        }  # fmt: skip

    def _failed(self, reason: str) -> None:
        if not self._fault:
            logger.warning("the run cannot be seen, looking again: %s", reason)
            self.history.happened(Line("bad", f"the run cannot be seen: {reason}"), self._clock.time())
        self._fault = reason
        self._state = self._state | {"fault": reason}
