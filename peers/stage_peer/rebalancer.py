"""Decides which blocks a newcomer takes, and when a peer moves to others, and claims those blocks in the DHT.

The DHT may be wrong about which peers are alive. So a peer leaves a block only after another peer that stays there has
answered, and goes only to a block whose state it can get.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from peers.shared.network import Membership
from peers.shared.room import named, written
from swarm.averaging.watch import has_quorum
from swarm.checkpoint import file
from swarm.dht.directory import Announcement
from swarm.errors import Fatal, SwarmError
from swarm.rebalancing.decision import next_check_seconds
from swarm.rebalancing.judgement import SETTLE_SECONDS, Judgement, costs_of
from swarm.rebalancing.layout import Span, layout_of
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import LONGEST_WAIT, Block, ClaimRecord, ClaimState, PeerId, PeerRecord, PeerState

logger = logging.getLogger(__name__)

ASKED = 8
"""How many peers of a stage are asked whether they serve, where one that serves is enough."""


class Claim:
    def __init__(self, membership: Membership, name: str) -> None:
        self._membership = membership
        self._name = name
        self._record: ClaimRecord | None = None
        self._announcement = Announcement(membership.directory, "the claim", self._present, membership.clock)

    @property
    def span(self) -> Span:
        return () if self._record is None else self._record.span

    async def make(self, span: Span, *, before: Span, confirmed: bool = False) -> ClaimRecord:
        """Claim a span, beside or instead of the one that this peer served before. Another peer's claim may still take
        precedence over it, unless it is confirmed at once."""
        now = self._membership.clock.time()
        self._record = ClaimRecord(
            peer_id=self._membership.peer_id, name=self._name, announced_at=now,
            **ClaimRecord.fields_of(span), **(ClaimRecord.fields_of(before, before=True) if before else {}),
            state=ClaimState.CONFIRMED if confirmed else ClaimState.PENDING, claimed_at=now,
        )  # fmt: skip
        await self._announcement.now()
        return self._record

    async def confirm(self, span: Span) -> None:
        """Confirm the claim: the peer goes to this span, which may be another one than it claimed at first."""
        assert self._record is not None, "what is confirmed was claimed"
        self._record = self._record.model_copy(update={"state": ClaimState.CONFIRMED, **ClaimRecord.fields_of(span)})
        await self._announcement.now()

    async def withdraw(self) -> None:
        if (last := self._present()) is not None:
            self._record = None
            await self._announcement.now(last.model_copy(update={"state": ClaimState.WITHDRAWN}))

    async def keep(self) -> None:
        await self._announcement.keep()

    def _present(self) -> ClaimRecord | None:
        member = self._membership
        now = {"announced_at": member.clock.time(), "waiting_for": member.waits.present[:LONGEST_WAIT]}
        return None if self._record is None else self._record.model_copy(update=now)


class Rebalancer:
    def __init__(
        self, membership: Membership, claim: Claim, rng: random.Random, *, every_seconds: float,
        checkpoints: Path | None, spans: Sequence[range] | None = None, starts_over: bool = False,
    ) -> None:  # fmt: skip
        """It checks every so many seconds on average whether to move, and never with 0. A block that no peer holds can
        be restored from `checkpoints`, if there are any. `spans` are the stages for which this machine has room
        together, with one variant of each; None: any single one. A newcomer that `starts_over` may also take a path
        of which nobody has a block yet."""
        self._membership = membership
        self._own_id = PeerId(membership.peer_id)
        self._claim = claim
        self._known = membership.known
        self._clock = membership.clock
        self._rng = rng
        self._every_seconds = every_seconds
        self._checkpoints = checkpoints
        self._starts_over = starts_over and len(membership.config.paths) > 1
        self._costs = costs_of(membership.config)
        self._poll = membership.poll()
        paths = list(map(membership.config.blocks_of, range(len(membership.config.paths))))
        fitting = None if spans is None else _along(paths, spans)
        self._has_room = fitting is None or {block for span in fitting for block in span} >= self._costs.keys()
        self._judgement = Judgement(
            own_id=self._own_id, costs=self._costs, spans=fitting, paths=dict.fromkeys(paths, 1.0)
        )

    # -- joining -----------------------------------------------------------------------------------------------------

    async def choose_span(self) -> Span:
        """Choose the blocks that this newcomer should serve, and claim them. Raises PeerUnavailable, and Fatal if no
        peer holds any block of the run any more."""
        records, claims = await self._look()
        former = [block for block, row in records.items() if any(record.peer_id == self._own_id for record in row)]
        lost = set[Block]() if self._starts_over else self._lost()
        first = self._some(self._judgement.first_choice(records, claims, lost))
        own = await self._claim.make(first, before=())
        await self._clock.sleep(SETTLE_SECONDS)
        records, claims = await self._look()
        lost = set[Block]() if self._starts_over else self._lost()
        span = self._some(self._judgement.choice(records, claims, own, lost))
        await self._claim.confirm(span)
        left = "".join(_why_not(before, span, lost) for before in former if before not in span)
        logger.info("chose %s of 0 to %s%s", named(span), max(self._costs), left)
        return span

    # -- moving ------------------------------------------------------------------------------------------------------

    async def next_move(self, span: Span, rates: Callable[[], Mapping[Block, float]]) -> Span:
        """Wait, possibly for ever, until this peer should move from its blocks. Claim the new ones, and return them.
        `rates` gives the samples per second that it manages at each block, as if it served that one alone."""
        self._judgement.serves()
        while True:
            if self._every_seconds <= 0:
                await asyncio.Event().wait()
            await self._clock.sleep(next_check_seconds(self._rng, self._every_seconds))
            self._judgement.measured(rates())
            try:
                target = await self._check(span)
            except SwarmError as error:
                logger.debug("no look at the other blocks: %s", error)
                continue
            if target:
                return target

    async def _check(self, span: Span) -> Span:
        """The span to which this peer should move, which it then has claimed; empty if it should stay."""
        records, claims = await self._look()
        layout = layout_of(records, claims, self._costs, self._judgement.paths)
        target = self._judgement.wants(layout, self._lost(), self._clock.monotonic())
        if target is None:
            return ()
        for block in span:
            if block not in target and not await self.can_spare(block):
                return ()
        for block in target:
            if block not in span and not await self._can_enter(block):
                return ()
        is_confirmed = False
        try:
            own = await self._claim.make(target, before=span)
            await self._clock.sleep(SETTLE_SECONDS)
            records, claims = await self._look()
            layout = layout_of(records, claims, self._costs, self._judgement.paths, own=own)
            if not self._judgement.still_wants(layout, target, self._lost(), self._clock.monotonic()):
                logger.info("stays at stage %s: others are on their way to stage %s", written(span), written(target))
                return ()
            await self._claim.confirm(target)
            is_confirmed = True
            return target
        finally:
            if not is_confirmed:
                # The claim is also withdrawn after errors and cancellation: otherwise others would count this peer at
                # `target`.
                await self._claim.withdraw()

    async def can_spare(
        self, block: Block, *, round_number: int = 0, lineage: str = "", last_members: Collection[str] = ()
    ) -> bool:
        """Whether another peer of the block answers that it serves at this round or a later one, and does not leave; if
        rounds need a majority, whether enough such peers do to make one in the next round.

        A peer at this very round with another lineage (it may have begun the stage anew) does not have what this peer
        has learnt, and does not count, unless `lineage` is empty. Without `last_members`, who took part in the last
        round, all announced ones count.
        """
        holders = await self._holders(block, round_number, lineage)
        return bool(holders) and has_quorum(
            self._membership.config.averaging.quorum, holders, last_members=last_members,
            announced=lambda: {self._own_id, *(record.peer_id for record in self._known.others(block))},
        )  # fmt: skip

    async def is_awaited(self, block: Block, *, round_number: int, lineage: str) -> bool:
        """Whether a peer on its way to the stage can get the stage's state from this peer alone; see `can_spare`.
        Raises PeerUnavailable."""
        claims = await self._membership.directory.claims()
        coming = (
            claim.peer_id for claim in claims
            if block in set(claim.span) - {*claim.from_span} and claim.state is ClaimState.CONFIRMED
        )  # fmt: skip
        if not any(peer_id != self._own_id for peer_id in coming):
            return False
        return not await self._holders(block, round_number, lineage)

    async def _holders(self, block: Block, round_number: int, lineage: str) -> set[str]:
        """Ids of the other peers of the stage that stay and hold this peer's state. If rounds need a majority, all
        peers are asked, otherwise a few."""
        _, claims = await self._look()
        leaving = {
            claim.peer_id for claim in claims
            if block in set(claim.from_span) - {*claim.span} and claim.state is ClaimState.CONFIRMED
        }  # fmt: skip
        staying = [record for record in self._known.others(block) if record.peer_id not in leaving]
        needs_all = self._membership.config.averaging.needs_majority
        return {
            reply.peer_id
            for reply in await self._ask(staying, num_asked=len(staying) if needs_all else ASKED)
            if reply.round > round_number or (reply.round == round_number and lineage in ("", reply.lineage))
        }

    async def _can_enter(self, block: Block) -> bool:
        others = self._known.others(block)
        if not others:
            # Nothing was learnt yet, or there is a checkpoint: otherwise `_lost` would have the stage.
            return True
        return bool(await self._ask(others))

    async def _ask(self, records: Sequence[PeerRecord], *, num_asked: int = ASKED) -> list[pb.DescribeReply]:
        """The replies of some of these peers, of those that serve and are not about to leave."""
        asked = self._rng.sample(records, min(num_asked, len(records)))
        return [reply for reply in await self._poll.replies(asked) if reply.state == PeerState.SERVING]

    # -- claims ------------------------------------------------------------------------------------------------------

    async def goes(self, span: Span, *, before: Span = ()) -> None:
        """Claim blocks, confirmed at once: this peer was told to serve them, or goes back to them."""
        await self._claim.make(span, before=before, confirmed=True)

    async def arrived(self, span: Span, *, move_seconds: float | None = None) -> None:
        """Note that the peer serves these blocks now, and that its next move may take as long as this one did."""
        self._judgement.arrived(span, move_seconds=move_seconds)
        await self._claim.withdraw()

    async def gave_up(self, span: Span, *, before: Span = ()) -> None:
        """Note that the peer could not move to these blocks from those before, so that it does not soon try again."""
        self._judgement.gave_up(span, self._clock.monotonic(), before=before)
        await self._claim.withdraw()

    # -- what the DHT tells ------------------------------------------------------------------------------------------

    async def _look(self) -> tuple[dict[Block, Sequence[PeerRecord]], list[ClaimRecord]]:
        # Claims are read before records: a peer that arrives in between then has both, and is counted once, at its
        # record.
        claims = await self._membership.directory.claims()
        directory, blocks = self._membership.directory, self._membership.blocks
        if len(self._membership.config.paths) > 1 and not self._membership.config.rounds.synchronous:
            self._judgement.see(await directory.trainers(partly=True))
        await self._known.look(directory, blocks)
        # A stage's throughput is the sum over all of its peers, whereas the sample that is known serves for routing.
        rows = await asyncio.gather(*map(directory.peers, blocks))
        records: dict[Block, Sequence[PeerRecord]] = dict(zip(blocks, rows, strict=True))
        present = {PeerId(record.peer_id) for row in records.values() for record in row}
        under_way = {PeerId(claim.peer_id) for claim in claims}
        self._judgement.look(present | under_way, self._clock.monotonic())
        return records, claims

    def _lost(self) -> set[Block]:
        """Blocks that no peer can enter: no peer and no checkpoint has what they learnt."""
        if not self._known.round:
            return set()
        return {block for block in self._costs if not self._known.others(block)} - self._restorable()

    def _some(self, span: Span | None) -> Span:
        if span is None:
            fits = "" if self._has_room else " that fits into this machine's memory"
            raise Fatal(
                f"nobody holds any stage of this run{fits} any more: if its peers are only frozen or cut off, start "
                "this one again when they are back; if they are gone for good, start a peer with --stage N and a "
                "checkpoint (--resume DIR)"
            )
        return span

    def _restorable(self) -> set[Block]:
        if self._checkpoints is None:
            return set()
        try:
            names = file.names(self._checkpoints)
        except OSError as error:
            logger.warning("%s cannot be read: %s", self._checkpoints, error.strerror)
            return set()
        num_stages = self._membership.config.stages.num_stages
        return {name.block for name in names if name.num_stages == num_stages}


def _along(paths: Iterable[Span], spans: Iterable[range]) -> list[Span]:
    """The blocks of these stages on each of the paths."""
    along = (path[stages.start : stages.stop] for stages, path in itertools.product(spans, paths))
    return list(dict.fromkeys(along))


def _why_not(former: Block, span: Span, lost: Collection[Block]) -> str:
    """Text that says why a peer that was killed and is back takes these blocks, and not the one at which its old record
    still announces it."""
    if former not in lost:
        needs = "needs" if len(span) == 1 else "need"
        return f", and not stage {former}, at which this peer was before: {named(span)} {needs} a peer more"
    return (
        f", and not stage {former}, at which this peer was before: it came back without the state, and no other peer "
        "and no checkpoint (--resume DIR) has it"
    )
