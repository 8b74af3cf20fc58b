"""The side of a computation that a waiting call sees: its progress, and whether another call took over.

The base of stage/computation. A call only subscribes: if it ends, a retry can use the computation.
"""

import asyncio
from collections.abc import Mapping

from swarm.hop.answers import HopListener, Obstacle
from swarm.machine.clock import wait
from swarm.types import PeerId


class Watched(HopListener):
    """The side of a computation that calls look at.

    Attributes:
        waiting_stage: the deepest stage that is waited for.
        obstacle: the reason if no peer of that stage takes the microbatch now; else None.
        route: the peers of later stages that work on the microbatch.
        subscriber: the call that gets the answer; a newer one takes its place.
    """

    def __init__(self, stage: int) -> None:
        self.waiting_stage = stage
        self.obstacle: Obstacle | None = None
        self.route: Mapping[int, PeerId] = {}
        self.subscriber: object | None = None
        self._is_wanted = asyncio.Event()
        self._news = asyncio.Event()

    @property
    def is_wanted(self) -> bool:
        """Whether a call waits for the answer. May be asked from another thread."""
        return self._is_wanted.is_set()

    async def wanted(self) -> None:
        """Return once a call waits for the answer."""
        await self._is_wanted.wait()

    async def news(self, seconds: float) -> None:
        """Wait until the computation is done, its route changes, or another call takes over; at most for `seconds`."""
        await wait(self._news, seconds)
        self._news.clear()

    def subscribe(self, subscriber: object) -> None:
        """Let `subscriber` have the answer. A former subscriber learns that it was superseded."""
        self.subscriber = subscriber
        self._is_wanted.set()
        self._news.set()

    def orphan(self) -> object:
        """Note that no call waits for the answer any more. Nothing is computed until a call subscribes again.

        Returns the object that takes the subscriber's place.
        """
        self.subscribe(object())
        self._is_wanted.clear()
        return self.subscriber

    def progress(self, stage: int, *, obstacle: Obstacle | None) -> None:
        self.waiting_stage, self.obstacle = stage, obstacle

    def routed(self, route: Mapping[int, PeerId]) -> None:
        self.route = dict(route)
        self._news.set()

    def ended(self) -> None:
        """Note that there is an answer, or that there will be none."""
        self._news.set()
