"""How a peer that is behind gets to where its group stands: a snapshot, then the results committed meanwhile.

Run by averaging/reporter when an answer tells of a peer that is ahead. While it runs, this peer promises no attempt
and reports nothing, so nobody counts it as a member. Never decides what is true: it takes what holders have.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from swarm.averaging import messages
from swarm.averaging.messages import Standing
from swarm.averaging.participant import Participant
from swarm.averaging.state_transfer import StateTransfer
from swarm.clock import Clock
from swarm.errors import IntegrityError, SwarmError
from swarm.types import PeerRecord

logger = logging.getLogger(__name__)

SIZE_FACTOR = 4
"""A snapshot may be so many times as large as the own one, which may lack the outer optimizer's state."""


class CatchUp:
    """One peer's way forward."""

    def __init__(
        self, *, participant: Participant, transfer: StateTransfer, donors: Callable[[], Sequence[PeerRecord]],
        is_ahead: Callable[[Standing, Standing], bool], clock: Clock, retry_seconds: float,
    ) -> None:  # fmt: skip
        """
        Args:
            donors: peers that may be ahead, the best first.
            is_ahead: whether a peer standing at the second should become what the first is.
            retry_seconds: wait between two tries where there is no going back.
        """
        self._participant = participant
        self._transfer = transfer
        self._donors = donors
        self._is_ahead = is_ahead
        self._clock = clock
        self._retry_seconds = retry_seconds
        self._ended = asyncio.Event()
        self._sources: list[PeerRecord] = []
        """Who sent the last snapshot and has not failed since: they keep the results."""
        self._max_bytes = 0
        self.num_downloads = 0

    async def run(self, target: Standing) -> None:
        """Come as far as `target` at least, or find that nobody has what it takes. A second call waits for the first.

        Cancelled, it leaves this peer where it is; segments that have come are kept.
        """
        if self._participant.is_catching_up:
            await self._ended.wait()
            return
        self._participant.is_catching_up = True
        self._ended.clear()
        try:
            await self._participant.step_back("this peer is behind its group")
            while not await self._try(target):
                await self._clock.sleep(self._retry_seconds)
        finally:
            self._participant.is_catching_up = False
            self._ended.set()

    async def _try(self, target: Standing) -> bool:
        """Whether this is over, if only because there is nothing to be had now."""
        try:
            while True:
                moved = await self._replay()
                if not self._is_behind(target):
                    break
                if not moved:
                    await self._download()
        except SwarmError as error:
            logger.warning("cannot catch up: %s", error)
            # A state that is nobody's must not stay.
            return self._participant.is_sound
        self._transfer.forget()
        return True

    def _is_behind(self, theirs: Standing) -> bool:
        return not self._participant.is_sound or self._is_ahead(theirs, self._participant.standing)

    async def _replay(self) -> bool:
        """Apply what the sources keep of the rounds since; whether that changed anything."""
        before = self._participant.standing
        for source in list(self._sources):
            if not self._participant.is_sound:
                break
            standing = self._participant.standing
            try:
                async for committed in self._transfer.results(source, standing, max_bytes=await self._size_limit()):
                    await self._participant.replay(committed)
            except SwarmError as error:
                logger.info("no more results from %s: %s", source.peer_id, error)
                self._sources.remove(source)
                if isinstance(error, IntegrityError):
                    self._transfer.distrust(source)
        if moved := self._participant.standing != before:
            logger.info("applied the rounds from %d to %d", before.round, self._participant.standing.round - 1)
        return moved

    async def _download(self) -> None:
        fetched = await self._transfer.snapshot(
            self._donors(), max_bytes=await self._size_limit(), wanted=self._is_wanted
        )
        standing = messages.standing_of(fetched.snapshot)
        if not self._is_wanted(standing):
            return
        try:
            await self._participant.install(fetched.snapshot, fetched.outcomes)
        except IntegrityError:
            for source in fetched.sources:
                self._transfer.distrust(source)
            raise
        self._sources = list(fetched.sources)
        self.num_downloads += 1
        logger.info("installed the snapshot of round %d, from %d donors", standing.round, len(fetched.sources))

    def _is_wanted(self, theirs: Standing) -> bool:
        own = self._participant.standing
        return self._is_ahead(theirs, own) or (theirs == own and not self._participant.is_sound)

    async def _size_limit(self) -> int:
        if not self._max_bytes:
            own = await self._participant.snapshot()
            self._max_bytes = SIZE_FACTOR * sum(tensor.nbytes for tensor in own.tensors.values())
        return self._max_bytes
