"""How a peer with a snapshot gets to where its group is: it applies the results committed since, one by one.

So does a member that missed only the result of the last round, where members averaged in groups. The peers that sent
the snapshot keep the results since. Often that is a single peer with a slow line. If other peers
hold the state by then, it is faster to begin anew with a snapshot from them.
"""

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import sha256

from swarm.averaging.advance import Advance
from swarm.averaging.agreement.pace import Entry, Pace
from swarm.averaging.agreement.place import Place
from swarm.averaging.reporter import Survey
from swarm.averaging.state_transfer import Fetched, StateTransfer
from swarm.averaging.wire.context import Context
from swarm.errors import IntegrityError, MalformedMessage, Overloaded, SwarmError
from swarm.machine.words import counted
from swarm.rpc.transfers import LONGEST_RETRY_SECONDS, PATIENCE_SECONDS
from swarm.types import PeerRecord

logger = logging.getLogger(__name__)

NUM_ASKED = 3
"""How many holders are asked for the one result that this peer lacks, before it fetches a snapshot."""
SAY_SECONDS = 10.0
"""Least time between two lines about how far behind this peer is."""


@dataclass(eq=False)
class MissedRounds:
    context: Context
    place: Place
    advance: Advance
    transfer: StateTransfer
    survey: Survey
    entry: Entry
    _sources: list[PeerRecord] = field(default_factory=list, init=False)
    """The peers that sent the last snapshot and have not failed since: they keep the results."""
    _snapshot_bytes: int = field(default=0, init=False)
    """The size of that snapshot. A result is no larger: it has the shapes of the weights, which are in there."""
    _since: tuple[float, int, int] | None = field(default=None, init=False)
    """Of the first result since this peer last waited for its turn: when it came, the round to which it brought this
    peer, and the group's round. None before that result."""
    _given_at: float = field(default=0.0, init=False)
    """When a source last sent anything."""
    _said_at: float = field(default=0.0, init=False)

    def follows(self, fetched: Fetched) -> None:
        """Note that this peer has installed a snapshot, and remember its sources."""
        self._sources = list(fetched.sources)
        self._snapshot_bytes = sum(tensor.nbytes for tensor in fetched.snapshot.tensors.values())

    def missed_one(self, holders: Sequence[PeerRecord], max_bytes: int) -> None:
        """Note that this peer may lack only the result of the last round, which holders keep if members averaged it in
        groups. Each member asks others of them, a few."""
        own_id = self.context.own_id
        by_chance = sorted(holders, key=lambda peer: sha256(f"{own_id} {peer.peer_id}".encode()).digest())
        self._sources, self._snapshot_bytes = by_chance[:NUM_ASKED], max_bytes

    async def apply(self) -> bool:
        """Apply the results that the sources keep. If this is cancelled, the last result is applied as a whole or not
        at all.

        Returns:
            Whether this peer gave up, because rounds are committed faster than it applies them, and a new snapshot is
            smaller than the results that it lacks. Then the caller has to ask all holders again where they stand.

        Raises:
            Overloaded: this peer gave up, because other peers hold the state by now, and it arrives sooner with a
                snapshot of theirs.
        """
        before, self._since, self._given_at = self.place.standing, None, self.context.clock.monotonic()
        try:
            is_losing = await self._from_all()
        except Overloaded:
            self._sources.clear()
            raise
        finally:
            if self.place.standing != before:
                logger.info("applied the rounds from %d to %d", before.round, self.place.standing.round - 1)
        if is_losing:
            self._sources.clear()
        return is_losing

    async def _from_all(self) -> bool:
        """Apply the results of one source after the other; a source that serves others first is asked again later."""
        left, held_up = deque(self._sources), dict[str, str]()
        with self.context.waits.on(lambda _: f"later rounds of {', '.join(held_up.values())}" if held_up else ""):
            while left and self.place.is_sound:
                source = left[0]
                try:
                    if await self._from_one(source, held_up):
                        return True
                    left.popleft()
                except Overloaded as error:
                    held_up[source.peer_id] = f"{source.display_name}: {error}"
                    left.rotate(-1)
                    await self._wait_for_turn(error, is_everywhere=len(held_up) >= len(left))
                except SwarmError as error:
                    logger.info("no more results from %s: %s", source.display_name, error)
                    left.popleft()
                    self._sources.remove(source)
                    if isinstance(error, IntegrityError | MalformedMessage):
                        self.transfer.distrust(source, error)
        return False

    async def _wait_for_turn(self, refusal: Overloaded, *, is_everywhere: bool) -> None:
        """Wait, if all sources serve others first. Raises Overloaded if other holders of the state may be faster than
        waiting, or the wait was too long."""
        # The pace is measured anew: rounds that are committed while this peer waits say nothing about its own pace.
        self._since = None
        if not is_everywhere:
            return
        if self.survey.has_newcomers():
            raise Overloaded("others have the state by now as well", retry_after_seconds=0.0)
        if self.context.clock.monotonic() - self._given_at >= PATIENCE_SECONDS:
            raise refusal
        await self.context.clock.sleep(min(refusal.retry_after_seconds, LONGEST_RETRY_SECONDS))

    async def _from_one(self, source: PeerRecord, held_up: dict[str, str]) -> bool:
        limit = self._snapshot_bytes
        async with aclosing(self.transfer.results(source, self.place.standing, max_bytes=limit)) as results:
            async for committed, group_round in results:
                held_up.clear()
                await self.advance.apply_missed(committed)
                self._given_at = self.context.clock.monotonic()
                self.entry.saw(group_round, now=self._given_at)
                pace = self._pace(committed.after.round, group_round)
                if self._gives_up(pace, committed.content.num_bytes):
                    return True
        return False

    def _pace(self, own_round: int, group_round: int) -> Pace:
        self._since = self._since or (self._given_at, own_round, group_round)
        began_at, first_own, first_group = self._since
        return Pace(
            seconds=self._given_at - began_at,
            num_applied=own_round - first_own,
            num_committed=group_round - first_group,
            num_behind=max(0, group_round - own_round),
        )

    def _gives_up(self, pace: Pace, num_bytes: int) -> bool:
        """Whether another snapshot from the same peers is better than going on. Logs now and then how far behind this
        peer is. `num_bytes` is the size of a round's result. Raises Overloaded if a snapshot from other peers is
        better."""
        is_less = pace.num_behind * num_bytes > self._snapshot_bytes
        if (is_less or pace.stands_still) and self.survey.has_newcomers():
            raise Overloaded(
                f"{counted(pace.num_behind, 'round')} behind, and others have the state by now as well",
                retry_after_seconds=0.0,
            )
        if is_less and pace.is_losing:
            self._say_losing(pace, num_bytes)
            return True
        self._say_left(pace)
        return False

    def _say_losing(self, pace: Pace, num_bytes: int) -> None:
        seconds = pace.seconds / pace.num_applied
        logger.warning(
            "%s behind, and falling back: this peer takes %.1f s to fetch and apply a round (%.3g MB, %.3g MB/s), and "
            "the group commits one every %.1f s. It takes a new snapshot, but like this it will never arrive: that "
            "needs a faster line or machine, here or where it fetches them, or longer rounds (rounds.round_samples)",
            counted(pace.num_behind, "round"),
            seconds,
            num_bytes / 1e6,
            num_bytes / 1e6 / seconds,
            pace.seconds / pace.num_committed,
        )

    def _say_left(self, pace: Pace) -> None:
        is_due = self._given_at - self._said_at >= SAY_SECONDS
        if pace.num_behind and is_due and (left := pace.seconds_left) is not None:
            logger.info(
                "%s behind: %d applied in %.0f s, in which the group committed %d; there in about %.0f s",
                counted(pace.num_behind, "round"), pace.num_applied, pace.seconds, pace.num_committed, left,
            )  # fmt: skip
            self._said_at = self._given_at
