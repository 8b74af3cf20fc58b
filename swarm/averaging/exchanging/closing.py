"""A contribution that is being frozen, or is frozen, for whichever attempt comes to want it.

Made by exchanging/own_round when a leader says Begin. Of a stage of several GB, or on a machine whose tasks take ten
seconds, to freeze takes longer than any call: so it outlives the call that asked for it, and the next one joins it.
Knows nothing of attempts.
"""

import asyncio

from swarm.averaging.exchanging.exchange import Closed


class Closing:
    """One contribution on its way.

    Attributes:
        drop: microbatches that are taken out of it.
        began_at: by the member's clock.
    """

    def __init__(self, *, drop: frozenset[int], began_at: float) -> None:
        self.drop = drop
        self.began_at = began_at
        self._outcome: asyncio.Future[Closed | Exception] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Whether it is frozen, or could not be."""
        return self._outcome.done()

    def end(self, outcome: Closed | Exception) -> None:
        """It is frozen, or that failed."""
        self._outcome.set_result(outcome)

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is over, but no longer than that; says whether it is."""
        await asyncio.wait([self._outcome], timeout=seconds)
        return self.is_over

    @property
    def closed(self) -> Closed:
        """What was frozen; once it is over. Raises what freezing it failed with."""
        outcome = self._outcome.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
