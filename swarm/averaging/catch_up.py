"""How a peer that is behind gets to where its group stands: a snapshot, then the results committed meanwhile.

Run by averaging/reporter when averaging/branches has decided to go elsewhere. While it runs, this peer promises no
attempt and reports nothing, so nobody counts it as a member. Takes the state from those alone that stand behind what
was decided.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from swarm.averaging import messages
from swarm.averaging.branches import Branches
from swarm.averaging.messages import Standing
from swarm.averaging.participant import Participant
from swarm.averaging.state_transfer import StateTransfer
from swarm.clock import Clock
from swarm.errors import IntegrityError, SwarmError
from swarm.types import PeerId, PeerRecord

logger = logging.getLogger(__name__)

SIZE_FACTOR = 4
"""A snapshot may be so many times as large as the own one, which may lack the outer optimizer's state."""


class CatchUp:
    """One peer's way forward."""

    def __init__(
        self, *, participant: Participant, transfer: StateTransfer, branches: Branches,
        record: Callable[[PeerId], PeerRecord | None], choose: Callable[[], Awaitable[Standing | None]], clock: Clock,
        retry_seconds: float,
    ) -> None:  # fmt: skip
        """
        Args:
            record: how a peer is reached.
            choose: asks all holders where they stand, and gives where this peer should go.
            retry_seconds: wait between two tries where there is no going back.
        """
        self._participant = participant
        self._transfer = transfer
        self._branches = branches
        self._record = record
        self._choose = choose
        self._clock = clock
        self._retry_seconds = retry_seconds
        self._ended = asyncio.Event()
        self._sources: list[PeerRecord] = []
        """Who sent the last snapshot and has not failed since: they keep the results."""
        self._max_bytes = 0
        self.num_downloads = 0

    async def run(self, target: Standing) -> None:
        """Come to `target`, or beyond, or find that nobody has what it takes. A second call waits for the first.

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
                target = await self._choose() or target
        finally:
            self._participant.is_catching_up = False
            self._ended.set()

    async def _try(self, target: Standing) -> bool:
        """Whether this is over, if only because there is nothing to be had now."""
        holders = [record for peer in sorted(self._branches.behind(target)) if (record := self._record(peer))]
        is_there = False
        try:
            while True:
                moved = await self._replay()
                is_there = is_there or self._branches.is_known(target)
                if self._participant.is_sound and is_there:
                    break
                if not moved:
                    await self._download(holders, target.round)
                    # They may have gone on for so long that what they tell of the past does not reach back to it.
                    is_there = True
        except SwarmError as error:
            logger.warning("cannot catch up: %s", error)
            # A state that is nobody's must not stay.
            return self._participant.is_sound
        self._transfer.forget()
        return True

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

    async def _download(self, holders: Sequence[PeerRecord], least_round: int) -> None:
        fetched = await self._transfer.snapshot(
            holders, max_bytes=await self._size_limit(), wanted=lambda theirs: theirs.round >= least_round
        )
        standing = messages.standing_of(fetched.snapshot)
        try:
            await self._participant.install(fetched.snapshot, fetched.outcomes, fetched.past)
        except IntegrityError:
            for source in fetched.sources:
                self._transfer.distrust(source)
            raise
        self._sources = list(fetched.sources)
        self.num_downloads += 1
        logger.info("installed the snapshot of round %d, from %d donors", standing.round, len(fetched.sources))

    async def _size_limit(self) -> int:
        if not self._max_bytes:
            own = await self._participant.snapshot()
            self._max_bytes = SIZE_FACTOR * sum(tensor.nbytes for tensor in own.tensors.values())
        return self._max_bytes
