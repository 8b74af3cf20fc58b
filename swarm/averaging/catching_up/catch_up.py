"""How a peer that is behind gets to where its group stands: a snapshot, then the results committed meanwhile.

Run by members/reporter when an answer came from another place in the run. All holders are asked where they stand, and
catching_up/branches decides where this peer should be. On its way there it promises no attempt and reports nothing, so
no peer counts it as a member. It takes the state only from peers that stand behind what was decided.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import aclosing

from swarm.averaging import messages
from swarm.averaging.catching_up.advance import Advance
from swarm.averaging.catching_up.entry import Entry
from swarm.averaging.catching_up.pace import Pace, Position
from swarm.averaging.catching_up.state_transfer import StateTransfer
from swarm.averaging.context import Context
from swarm.averaging.exchanging.own_round import OwnRound
from swarm.averaging.members.roster import Roster
from swarm.averaging.members.survey import Survey
from swarm.averaging.messages import Standing
from swarm.averaging.place import Place
from swarm.errors import IntegrityError, Overloaded, SwarmError
from swarm.machine.words import counted
from swarm.types import PeerId, PeerRecord

logger = logging.getLogger(__name__)

SIZE_FACTOR = 4
"""The largest snapshot that is taken, as a multiple of this peer's own, which may lack the outer optimizer's state."""

SAY_SECONDS = 10.0
"""Least time between two lines about how far behind this peer is."""


class CatchUp:
    """Brings one peer to where it should be in the run."""

    def __init__(
        self,
        context: Context,
        place: Place,
        *,
        own_round: OwnRound,
        advance: Advance,
        transfer: StateTransfer,
        roster: Roster,
        survey: Survey,
        entry: Entry,
    ) -> None:
        self._context = context
        self._place = place
        self._own_round = own_round
        self._advance = advance
        self._transfer = transfer
        self._roster = roster
        self._survey = survey
        self._entry = entry
        self._clock = context.clock
        self._looking: asyncio.Event | None = None
        """There while a `look` is under way; set when that ends."""
        self._rests_until = -math.inf
        """Until this time, a peer that is known to be elsewhere is no reason to ask all again."""
        self._sources: list[PeerRecord] = []
        """The peers that sent the last snapshot and have not failed since: they keep the results."""
        self._max_bytes = 0
        self._snapshot_bytes = 0
        """The size of the last snapshot that was installed."""
        self._said_at = -math.inf
        self._told_rate = math.nan
        """The rate of this peer's line when the log said last that it is too slow."""
        self.num_downloads = 0

    async def look(self, because_of: PeerId) -> None:
        """Ask all holders where they stand, and go where this peer should be; a second call waits for the first.

        A peer that is known to be elsewhere, and is not followed, is no reason to ask all again at once.
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
        before, branches, timing = self._place.standing, self._place.branches, self._context.timing
        target = await self._survey.choose()
        if before != self._place.standing:
            return
        if target is not None:
            await self._go(target)
            if before != self._place.standing:
                self._context.changes.notify()
            return
        for refusal in branches.stay():
            logger.warning("%s", refusal)
        rest_seconds = timing.heartbeat_seconds if branches.is_in_doubt else timing.max_retry_seconds
        self._rests_until = self._clock.monotonic() + rest_seconds

    async def _go(self, target: Standing) -> None:
        """Get to `target` or beyond, or find that no peer can give what that takes. Only one call at a time.

        If cancelled, it leaves this peer where it is; segments that have come are kept.
        """
        assert not self._place.is_catching_up
        self._entry.begin()
        with self._advance.catching_up():
            await self._own_round.step_back("this peer is behind its group")
            while not await self._try(target):
                # Without a new target this peer keeps to the old one, because it cannot go back to where it was.
                await self._clock.sleep(self._context.timing.max_retry_seconds)
                target = await self._survey.choose() or target

    async def _try(self, target: Standing) -> bool:
        """Go on towards `target`. Returns whether to stop: this peer is there, or failed with its own state sound."""
        holders = list(self._roster.contacts.records(sorted(self._place.branches.behind(target))).values())
        is_there = False
        try:
            while True:
                before = self._place.standing
                if await self._replay():
                    # The holders have gone on, and must be asked again where they stand.
                    self._sources.clear()
                    return False
                is_there = is_there or self._place.branches.is_known(target)
                if self._place.is_sound and is_there:
                    if holders and await self._stays_out(holders):
                        return False
                    break
                if self._place.standing == before:
                    await self._download(holders, target.round)
                    # The holders may have gone on so far that the past that they tell does not reach back to `target`.
                    is_there = True
        except Overloaded as error:
            logger.info("looks again for who can give the state: %s", error)
            return False
        except SwarmError as error:
            logger.warning("cannot catch up: %s", error)
            # A peer whose state is not sound may not stop here.
            return self._place.is_sound
        self._transfer.forget()
        return True

    async def _replay(self) -> bool:
        """Apply the results of the rounds after this peer's, as far as the sources keep them.

        Returns:
            Whether replaying was given up, because the group commits faster and a new snapshot is less to fetch.
        """
        before, pace, is_losing = self._place.standing, None, False
        for source in list(self._sources):
            if not self._place.is_sound:
                break
            standing = self._place.standing
            try:
                limit = await self._size_limit()
                async with aclosing(self._transfer.results.after(source, standing, max_bytes=limit)) as results:
                    async for committed, donor_round in results:
                        await self._advance.replay(committed)
                        now = Position(
                            at=self._clock.monotonic(), own_round=committed.after.round, group_round=donor_round
                        )
                        self._entry.saw(donor_round, now=now.at)
                        pace = Pace(first=pace.first if pace else now, newest=now)
                        num_bytes = sum(tensor.nbytes for tensor in committed.result.tensors.values())
                        is_losing = pace.is_losing and now.num_behind * num_bytes > self._snapshot_bytes
                        self._say(pace, num_bytes, is_losing=is_losing)
                        if is_losing:
                            break
            except SwarmError as error:
                logger.info("no more results from %s: %s", source.peer_id, error)
                self._sources.remove(source)
                if isinstance(error, IntegrityError):
                    self._transfer.distrust(source)
            if is_losing:
                break
        if self._place.standing != before:
            logger.info("applied the rounds from %d to %d", before.round, self._place.standing.round - 1)
        return is_losing

    def _say(self, pace: Pace, num_bytes: int, *, is_losing: bool) -> None:
        """Say now and then how far behind this peer is, and whether it will arrive.

        Args:
            num_bytes: the size of a round's result.
        """
        behind, now = pace.newest.num_behind, self._clock.monotonic()
        if is_losing:
            seconds = pace.seconds / pace.num_replayed
            logger.warning(
                "%s behind, and falling back: this peer takes %.1f s to fetch and replay a round (%.3g MB, "
                "%.3g MB/s), and the group commits one every %.1f s. It takes a new snapshot, but like this it will "
                "never arrive: that needs a faster line or machine, or longer rounds (rounds.round_samples)",
                counted(behind, "round"),
                seconds,
                num_bytes / 1e6,
                num_bytes / 1e6 / seconds,
                pace.seconds / pace.num_committed,
            )
        elif behind and now - self._said_at >= SAY_SECONDS and (left := pace.seconds_left) is not None:
            logger.info(
                "%s behind: %d replayed in %.0f s, in which the group committed %d; there in about %.0f s",
                counted(behind, "round"),
                pace.num_replayed,
                pace.seconds,
                pace.num_committed,
                left,
            )
            self._said_at = now

    async def _stays_out(self, holders: Sequence[PeerRecord]) -> bool:
        """Whether this peer is where the group is, and yet must not become a member: its line is too slow."""
        if self._entry.slowness is not None and self._entry.should_measure(self._clock.monotonic()):
            try:
                await self._download(holders, self._place.standing.round)
            except SwarmError as error:
                logger.info("this peer's line could not be measured again: %s", error)
        if (slowness := self._entry.slowness) is None:
            return False
        if slowness.bytes_per_second != self._told_rate:
            logger.warning(
                "this peer cannot take part in a synchronous run over this line: it carries %.3g MB/s, so an exchange "
                "would take %.1f s, and a round takes %.1f s without this peer. It stays out, follows the group, and "
                "measures its line again now and then; that needs a faster line, or longer rounds "
                "(rounds.round_samples)",
                slowness.bytes_per_second / 1e6,
                slowness.exchange_seconds,
                slowness.round_seconds,
            )
            self._told_rate = slowness.bytes_per_second
        return True

    async def _download(self, holders: Sequence[PeerRecord], least_round: int) -> None:
        asked = {holder.peer_id for holder in holders}
        fetched = await self._transfer.snapshot(
            holders,
            max_bytes=await self._size_limit(),
            wanted=lambda theirs: theirs.round >= least_round,
            has_others=lambda: bool(self._roster.contacts.serving().keys() - asked),
        )
        self._entry.downloaded(fetched.bytes_per_second, seconds=fetched.seconds, now=self._clock.monotonic())
        standing = messages.standing_of(fetched.snapshot)
        try:
            await self._advance.install(fetched.snapshot, fetched.outcomes, fetched.past)
        except IntegrityError:
            for source in fetched.sources:
                self._transfer.distrust(source)
            raise
        self._sources = list(fetched.sources)
        self._snapshot_bytes = sum(tensor.nbytes for tensor in fetched.snapshot.tensors.values())
        self.num_downloads += 1
        logger.info(
            "installed the snapshot of round %d, from %s", standing.round, counted(len(fetched.sources), "donor")
        )

    async def _size_limit(self) -> int:
        if not self._max_bytes:
            own = await self._advance.snapshot()
            self._max_bytes = SIZE_FACTOR * sum(tensor.nbytes for tensor in own.tensors.values())
        return self._max_bytes
