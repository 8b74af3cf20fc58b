"""The round at which a stage peer is, and waits for the next one.

Used by stage/stage, stage/admission and the settings. Never moves the peer: its averaging does.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from swarm.errors import NotReady
from swarm.stage.weights import StageWeights

_LOOK_SECONDS = 0.25
"""How often a microbatch that waits for the next round checks whether this peer has fallen behind."""


class PresentRound:
    """The round at which one peer is.

    Attributes:
        is_behind: whether this peer's group is at a later round, whose state is on its way.
    """

    def __init__(self, weights: StageWeights) -> None:
        self._weights = weights
        self.is_behind = False
        self._new = asyncio.Event()

    @property
    def number(self) -> int:
        """The round that is being worked on."""
        return self._weights.round.number

    def began(self) -> None:
        """Wake all tasks that wait for a round, because the weights are at a new one."""
        self._new.set()

    async def reach(self, number: int, seconds: float) -> None:
        """Wait until this peer is at a round, or a later one. Raises TimeoutError after `seconds`."""
        async with asyncio.timeout(seconds):
            while self.number < number:
                self._new.clear()
                await self._new.wait()

    async def wait_for(self, number: int, seconds: float, still_waiting: Callable[[], Awaitable[None]] | None) -> None:
        """Wait for a round, unless it would take long.

        Args:
            still_waiting: called at once, and again and again during the wait. An error that it raises ends the wait.

        Raises:
            NotReady: this peer is behind its group, or `seconds` have passed.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + seconds
        while self.number < number:
            if self.is_behind or now() >= deadline:
                raise NotReady(f"this peer is at round {self.number}, and will be for a while")
            if still_waiting is not None:
                await still_waiting()
            with contextlib.suppress(TimeoutError):
                await self.reach(number, min(_LOOK_SECONDS, deadline - now()))
