"""Looks around when an answer came from another place in the run, and goes where this peer should be.

Used by members/reporter. Which place that is, catching_up/branches says, and catching_up/catch_up gets there.
"""

import asyncio
import logging
import math

from swarm.averaging.catching_up.catch_up import CatchUp
from swarm.averaging.changes import Changes
from swarm.averaging.context import Context
from swarm.averaging.members.survey import Survey
from swarm.averaging.place import Place
from swarm.types import PeerId

logger = logging.getLogger(__name__)


class Lookout:
    """One peer's looks around."""

    def __init__(self, context: Context, place: Place, survey: Survey, catch_up: CatchUp, changes: Changes) -> None:
        self._clock = context.clock
        self._timing = context.timing
        self._place = place
        self._survey = survey
        self._catch_up = catch_up
        self._changes = changes
        self._looking: asyncio.Event | None = None
        """While all are asked where they stand, and what follows is done; set at its end."""
        self._rests_until = -math.inf
        """Until then nobody is asked again because of peers that are known to be elsewhere."""

    async def look(self, because_of: PeerId) -> None:
        """Ask all holders where they stand, and go where this peer should be; a second call waits for the first.

        It is not done at once again because of a peer of which it is settled that it is elsewhere.
        """
        if self._looking is not None:
            await self._looking.wait()
            return
        if self._place.branches.is_elsewhere(because_of) and self._clock.monotonic() < self._rests_until:
            return
        looking = self._looking = asyncio.Event()
        try:
            await self._look()
        finally:
            self._looking = None
            looking.set()

    async def _look(self) -> None:
        before, branches = self._place.standing, self._place.branches
        target = await self._survey.choose()
        if before != self._place.standing:
            return
        if target is not None:
            await self._catch_up.run(target)
            if before != self._place.standing:
                self._changes.notify()
            return
        for refusal in branches.stay():
            logger.warning("%s", refusal)
        rest_seconds = self._timing.heartbeat_seconds if branches.is_in_doubt else self._timing.max_retry_seconds
        self._rests_until = self._clock.monotonic() + rest_seconds
