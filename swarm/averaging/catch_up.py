"""How a peer that is behind gets to where its group stands: it installs a snapshot, then applies the results committed
since.

All holders are asked where they stand, and agreement/branches decides where this peer should be. On its way there this
peer promises no attempt and reports nothing, so no peer counts it as a member. It takes the state only from peers that
stand behind the place that was chosen.
"""

import asyncio
import logging
import math
from collections.abc import Sequence

from swarm.averaging.advance import Advance
from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.pace import Entry
from swarm.averaging.agreement.place import Place
from swarm.averaging.missed_rounds import MissedRounds
from swarm.averaging.reporter import Survey
from swarm.averaging.state_transfer import StateTransfer, Wanted
from swarm.averaging.wire.context import Context
from swarm.errors import IntegrityError, Overloaded, SwarmError
from swarm.machine.words import Repeats, counted
from swarm.types import PeerId, PeerRecord

logger = logging.getLogger(__name__)

SIZE_FACTOR = 4
"""The largest snapshot that is accepted, as a multiple of the size of this peer's own state, which may lack the outer
optimizer's state."""


class CatchUp:
    def __init__(
        self, context: Context, place: Place, *, advance: Advance, transfer: StateTransfer, survey: Survey,
        entry: Entry, missed_rounds: MissedRounds,
    ) -> None:  # fmt: skip
        self._context = context
        self._place = place
        self._advance = advance
        self._transfer = transfer
        self._survey = survey
        self._entry = entry
        self._missed_rounds = missed_rounds
        self._looking: asyncio.Event | None = None
        """Set at the end of the `look` that is under way; None while none is."""
        self._rests_until = -math.inf
        """Until this time, a peer on another branch that this peer already knows of does not make it ask all holders
        again."""
        self._max_bytes = 0
        self._held_at = -math.inf
        """The last time at which some other peer was known to hold the state."""
        self.fault = ""
        """Why this peer's last try to get to where it should be failed; empty if it did not."""
        self._faults = Repeats(context.clock)
        self._is_trying = False
        self._in_vain_since = self._failed_at = context.clock.monotonic()
        self._bytes_until_failure = 0
        """How many bytes of snapshots had come when the last try failed."""
        self.num_downloads = 0

    @property
    def vain_seconds(self) -> float:
        """For how long nothing has come with which this peer gets nearer to its group. While a try is under way, this
        counts up to the last one that failed: a try may take long, and ends by itself."""
        until = self._failed_at if self._is_trying else self._context.clock.monotonic()
        return until - self._in_vain_since

    async def look(self, because_of: PeerId) -> None:
        """Ask all holders where they stand, and go where this peer should be. A second call waits for the first.

        If `because_of` is known to be on another branch that this peer does not follow, it does nothing for a while.
        """
        if self._looking is not None:
            await self.ended()
            return
        if self._place.branches.is_elsewhere(because_of) and self._context.clock.monotonic() < self._rests_until:
            return
        looking = self._looking = asyncio.Event()
        try:
            await self._look()
        finally:
            self._looking = None
            looking.set()

    async def ended(self) -> None:
        if self._looking is not None:
            await self._looking.wait()

    async def arrived(self) -> None:
        """Wait until this peer is where it should be. After a failure it waits for the next `look`, but not for long:
        otherwise a peer could keep this one from serving by offers that always fail."""
        await self.ended()
        timing, began_at = self._context.timing, self._context.clock.monotonic()
        while self.fault and self._context.clock.monotonic() - began_at < timing.missed_seconds:
            await self._context.clock.sleep(timing.heartbeat_seconds)
            await self.ended()

    async def _look(self) -> None:
        before, branches, timing = self._place.standing, self._place.branches, self._context.timing
        target = await self._survey.choose()
        if before != self._place.standing:
            return
        if target is not None:
            await self._go(target)
            if before != self._place.standing:
                self._context.changes.notify()
            return
        self.fault = ""
        for refusal in branches.stay():
            logger.warning("%s", refusal)
        rest_seconds = timing.heartbeat_seconds if branches.is_in_doubt else timing.max_retry_seconds
        self._rests_until = self._context.clock.monotonic() + rest_seconds

    def _present(self, target: Standing) -> Standing:
        """Return the standing for which holders are looked up next. It is this peer's own if others stand there too,
        because the past that they report may not reach back to `target`; else it is `target`."""
        own = self._place.standing
        return own if self._place.branches.behind(own) else target

    async def _go(self, target: Standing) -> None:
        """Get to `target` or beyond, or give up because no peer can give the state. Only one call at a time.

        If cancelled, it leaves this peer where it is; segments that have come are kept.
        """
        assert not self._place.is_catching_up
        self._entry.begin()
        with self._context.waits.on(lambda _: self._entry.awaited):
            async with self._advance.catching_up():
                await self._arrive(target)

    async def _arrive(self, target: Standing) -> None:
        while True:
            self._entry.saw(target.round, now=self._context.clock.monotonic())
            if (rest_seconds := await self._try(target)) is None:
                return
            # Without a new target this peer keeps to the old one, because it cannot go back to where it was.
            await self._context.clock.sleep(rest_seconds)
            target = await self._survey.choose() or self._present(target)

    async def _try(self, target: Standing) -> float | None:
        """Go on towards `target`.

        Returns:
            Seconds until the next try. None means to stop: this peer has arrived, or failed while its own state is
            sound.
        """
        holders = self._survey.behind(target)
        rest_seconds = self._context.timing.max_retry_seconds
        is_there = has_gone_wrong = False
        if self._context.config.averaging.group_size and target.round == self._place.standing.round + 1:
            self._missed_rounds.missed_one(holders, await self._size_limit())
        self._is_trying = True
        try:
            while True:
                before, was_sound = self._place.standing, self._place.is_sound
                if await self._missed_rounds.apply():
                    # The holders have gone on, and must be asked again where they stand.
                    return rest_seconds
                if was_sound and not self._place.is_sound:
                    if has_gone_wrong:
                        raise IntegrityError(f"results of {_names(holders)} twice gave another state than at them")
                    has_gone_wrong = True
                is_there = is_there or self._place.branches.is_known(target)
                if self._place.is_sound and is_there:
                    if await self._stays_out(holders):
                        return rest_seconds
                    break
                if self._place.standing == before:
                    # An older snapshot will do: a holder may still keep one for others, with the results since.
                    nearest = before.round + 1 if self._place.is_sound else target.round
                    await self._download(holders, min(nearest, target.round))
                    # Checked by the round: the holders may be so far ahead that the past they report does not reach
                    # back to `target`.
                    is_there = self._place.standing.round >= target.round
        except Overloaded as error:
            logger.info("looks again for a peer that can give the state: %s", error)
            self._in_vain_since = self._context.clock.monotonic()
            return error.retry_after_seconds
        except SwarmError as error:
            self._failed(error)
            # A peer whose state is not sound may not stop here.
            return None if self._place.is_sound else rest_seconds
        finally:
            self._is_trying = False
        self._transfer.forget()
        self.fault, self._in_vain_since = "", self._context.clock.monotonic()
        return None

    def _failed(self, error: SwarmError) -> None:
        if self._faults.count(str(error)):
            logger.warning("cannot catch up: %s", error)
        self.fault, self._failed_at = str(error), self._context.clock.monotonic()
        num_bytes = self._transfer.num_bytes
        # Parts of a state bring this peer nearer. But a holder that sends parts of ever new states may not keep it.
        if not isinstance(error, IntegrityError) and self._bytes_until_failure < num_bytes <= self._max_bytes:
            self._in_vain_since = self._failed_at
        self._bytes_until_failure = num_bytes

    async def _stays_out(self, holders: Sequence[PeerRecord]) -> bool:
        """Whether this peer must not become a member, although it is where the group is, because its line is too slow.

        It may become one after no other peer has held the stage's state for a while. It waits that long because, over a
        slow line, answers may just be late.
        """
        now = self._context.clock.monotonic()
        if holders:
            self._held_at = now
        elif now - self._held_at >= self._context.timing.missed_seconds:
            return False
        if holders and self._entry.slowness is not None and self._entry.should_measure(now):
            try:
                await self._download(holders, self._place.standing.round)
            except SwarmError as error:
                logger.info("this peer's line could not be measured again: %s", error)
        return self._entry.keeps_out()

    async def _download(self, holders: Sequence[PeerRecord], least_round: int) -> None:
        wanted = Wanted(max_bytes=await self._size_limit(), is_useful=lambda theirs: theirs.round >= least_round)
        chosen = await self._transfer.begin(holders, wanted)
        fetched = await self._transfer.fetch(chosen, self._survey.has_newcomers)
        self._entry.downloaded(fetched.bytes_per_second, seconds=fetched.seconds, now=self._context.clock.monotonic())
        standing = messages.standing_of(fetched.snapshot)
        try:
            await self._advance.install(fetched.snapshot, fetched.outcomes, fetched.past, fetched.amendments)
        except IntegrityError as error:
            for source in fetched.sources:
                self._transfer.distrust(source, error)
            raise IntegrityError(f"the state that {_names(fetched.sources)} gave is wrong: {error}") from error
        self._missed_rounds.follows(fetched)
        self.num_downloads += 1
        logger.info(
            "installed the snapshot of round %d, from %s", standing.round, counted(len(fetched.sources), "donor")
        )

    async def _size_limit(self) -> int:
        if not self._max_bytes:
            own = await self._advance.snapshot()
            self._max_bytes = SIZE_FACTOR * sum(tensor.nbytes for tensor in own.tensors.values())
        return self._max_bytes


def _names(peers: Sequence[PeerRecord]) -> str:
    return ", ".join(one.display_name for one in peers)
