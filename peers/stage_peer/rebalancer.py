"""Decides which stage a newcomer takes, and when a peer moves to another one, and claims that stage in the DHT.

The DHT may be wrong about which peers are alive. So a peer leaves a stage only after another peer that stays there has
answered, and goes only to a stage whose state it can get.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from peers.shared.network import Membership
from swarm.averaging.agreement.rules import has_quorum
from swarm.checkpoint import file
from swarm.dht.directory import Announcement
from swarm.errors import Fatal, SwarmError
from swarm.rebalancing.decision import next_check_seconds
from swarm.rebalancing.judgement import SETTLE_SECONDS, Judgement, costs_of
from swarm.rebalancing.layout import layout_of
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
    def stage(self) -> int | None:
        return None if self._record is None else self._record.stage

    async def make(self, block: Block, *, from_block: Block | None, confirmed: bool = False) -> ClaimRecord:
        """Claim a block. Another peer's claim may still take precedence over it, unless it is confirmed at once."""
        now, before = self._membership.clock.time(), from_block or Block(0)
        self._record = ClaimRecord(
            peer_id=self._membership.peer_id, name=self._name, announced_at=now, stage=block.stage,
            variant=block.variant, from_stage=from_block and before.stage, from_variant=before.variant,
            state=ClaimState.CONFIRMED if confirmed else ClaimState.PENDING, claimed_at=now,
        )  # fmt: skip
        await self._announcement.now()
        return self._record

    async def confirm(self, block: Block) -> None:
        """Confirm the claim: the peer goes to this block, which may be another one than it claimed at first."""
        assert self._record is not None, "what is confirmed was claimed"
        goes = {"state": ClaimState.CONFIRMED, "stage": block.stage, "variant": block.variant}
        self._record = self._record.model_copy(update=goes)
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
        checkpoints: Path | None, unfit: Collection[int] = (),
    ) -> None:  # fmt: skip
        """It checks every so many seconds on average whether to move, and never with 0. A stage that no peer holds can
        be restored from `checkpoints`, if there are any. For `unfit` stages this machine has too little memory."""
        self._membership = membership
        self._own_id = PeerId(membership.peer_id)
        self._claim = claim
        self._known = membership.known
        self._clock = membership.clock
        self._rng = rng
        self._every_seconds = every_seconds
        self._checkpoints = checkpoints
        self._unfit = set(map(Block, unfit))
        self._costs = costs_of(membership.config)
        self._poll = membership.poll()
        self._judgement = Judgement(own_id=self._own_id, costs=self._costs)

    # -- joining -----------------------------------------------------------------------------------------------------

    async def choose_stage(self) -> int:
        """Choose the stage that this newcomer should serve, and claim it. Raises PeerUnavailable, and Fatal if no peer
        holds any stage of the run any more."""
        records, claims = await self._look()
        former = [block for block, row in records.items() if any(record.peer_id == self._own_id for record in row)]
        first = self._some(self._judgement.first_choice(records, claims, self._closed()))
        own = await self._claim.make(first, from_block=None)
        await self._clock.sleep(SETTLE_SECONDS)
        records, claims = await self._look()
        lost = self._lost()
        block = self._some(self._judgement.choice(records, claims, own, self._unfit | lost))
        await self._claim.confirm(block)
        left = "".join(_why_not(before, block, lost) for before in former if before != block)
        logger.info("chose stage %s of 0 to %s%s", block, max(self._costs), left)
        return block.stage

    # -- moving ------------------------------------------------------------------------------------------------------

    async def next_move(self, stage: int, rate: Callable[[], float]) -> int:
        """Wait, possibly for ever, until this peer should move from `stage`, where it computes with the `rate`, in
        samples per second. Claim the new stage, and return it."""
        self._judgement.serves()
        while True:
            if self._every_seconds <= 0:
                await asyncio.Event().wait()
            await self._clock.sleep(next_check_seconds(self._rng, self._every_seconds))
            self._judgement.measured(Block(stage), rate())
            try:
                target = await self._check(Block(stage))
            except SwarmError as error:
                logger.debug("no look at the other stages: %s", error)
                continue
            if target is not None:
                return target.stage

    async def _check(self, block: Block) -> Block | None:
        records, claims = await self._look()
        layout = layout_of(records, claims, self._costs)
        target = self._judgement.wants(layout, self._closed(), self._clock.monotonic())
        if target is None:
            return None
        if not await self.can_spare(block.stage) or not await self._can_enter(target):
            return None
        is_confirmed = False
        try:
            own = await self._claim.make(target, from_block=block)
            await self._clock.sleep(SETTLE_SECONDS)
            records, claims = await self._look()
            layout = layout_of(records, claims, self._costs, own=own)
            if not self._judgement.still_wants(layout, target, self._closed(), self._clock.monotonic()):
                logger.info("stays at stage %s: others are on their way to stage %s", block, target)
                return None
            await self._claim.confirm(target)
            is_confirmed = True
            return target
        finally:
            if not is_confirmed:
                # The claim is also withdrawn after errors and cancellation: otherwise others would count this peer at
                # `target`.
                await self._claim.withdraw()

    async def can_spare(
        self, stage: int, *, round_number: int = 0, lineage: str = "", last_members: Collection[str] = ()
    ) -> bool:
        """Whether another peer of the stage answers that it serves at this round or a later one, and does not leave; if
        rounds need a majority, whether enough such peers do to make one in the next round.

        A peer at this very round with another lineage (it may have begun the stage anew) does not have what this peer
        has learnt, and does not count, unless `lineage` is empty. Without `last_members`, who took part in the last
        round, all announced ones count.
        """
        holders = await self._holders(Block(stage), round_number, lineage)
        return bool(holders) and has_quorum(
            self._membership.config.averaging.quorum, holders, last_members=last_members,
            announced=lambda: {self._own_id, *(record.peer_id for record in self._known.others(Block(stage)))},
        )  # fmt: skip

    async def is_awaited(self, stage: int, *, round_number: int, lineage: str) -> bool:
        """Whether a peer on its way to the stage can get the stage's state from this peer alone; see `can_spare`.
        Raises PeerUnavailable."""
        claims = await self._membership.directory.claims()
        coming = (
            claim.peer_id for claim in claims if claim.block == Block(stage) and claim.state is ClaimState.CONFIRMED
        )
        if not any(peer_id != self._own_id for peer_id in coming):
            return False
        return not await self._holders(Block(stage), round_number, lineage)

    async def _holders(self, block: Block, round_number: int, lineage: str) -> set[str]:
        """Ids of the other peers of the stage that stay and hold this peer's state. If rounds need a majority, all
        peers are asked, otherwise a few."""
        _, claims = await self._look()
        leaving = {
            claim.peer_id for claim in claims if claim.from_block == block and claim.state is ClaimState.CONFIRMED
        }
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

    async def goes(self, stage: int, *, from_stage: int | None) -> None:
        """Claim a stage, confirmed at once: this peer was told to serve it, or goes back to it."""
        before = None if from_stage is None else Block(from_stage)
        await self._claim.make(Block(stage), from_block=before, confirmed=True)

    async def arrived(self, stage: int, *, move_seconds: float | None = None) -> None:
        """Note that the peer serves the stage now, and that its next move may take as long as this one did."""
        self._judgement.arrived(Block(stage), move_seconds=move_seconds)
        await self._claim.withdraw()

    async def gave_up(self, stage: int) -> None:
        """Note that the peer could not leave its stage for this one, or not enter this one, so that it does not soon
        try again."""
        self._judgement.gave_up(Block(stage), self._clock.monotonic())
        await self._claim.withdraw()

    # -- what the DHT tells ------------------------------------------------------------------------------------------

    async def _look(self) -> tuple[dict[Block, Sequence[PeerRecord]], list[ClaimRecord]]:
        # Claims are read before records: a peer that arrives in between then has both, and is counted once, at its
        # record.
        claims = await self._membership.directory.claims()
        directory, blocks = self._membership.directory, self._membership.blocks
        await self._known.look(directory, blocks)
        # A stage's throughput is the sum over all of its peers, whereas the sample that is known serves for routing.
        rows = await asyncio.gather(*map(directory.peers, blocks))
        records: dict[Block, Sequence[PeerRecord]] = dict(zip(blocks, rows, strict=True))
        present = {PeerId(record.peer_id) for row in records.values() for record in row}
        under_way = {PeerId(claim.peer_id) for claim in claims}
        self._judgement.look(present | under_way, self._clock.monotonic())
        return records, claims

    def _closed(self) -> set[Block]:
        """Blocks that this peer cannot enter."""
        return self._unfit | self._lost()

    def _lost(self) -> set[Block]:
        """Blocks that no peer can enter: no peer and no checkpoint has what they learnt."""
        if not self._known.round:
            return set()
        return {block for block in self._costs if not self._known.others(block)} - self._restorable()

    def _some(self, block: Block | None) -> Block:
        if block is None:
            fits = " that fits into this machine's memory" if self._unfit else ""
            raise Fatal(
                f"nobody holds any stage of this run{fits} any more: if its peers are only frozen or cut off, start "
                "this one again when they are back; if they are gone for good, start a peer with --stage N and a "
                "checkpoint (--resume DIR)"
            )
        return block

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


def _why_not(former: Block, block: Block, lost: Collection[Block]) -> str:
    """Text that says why a peer that was killed and is back takes this stage, and not the stage at which its old record
    still announces it."""
    if former not in lost:
        return f", and not stage {former}, at which this peer was before: stage {block} needs a peer more"
    return (
        f", and not stage {former}, at which this peer was before: it came back without the state, and no other peer "
        "and no checkpoint (--resume DIR) has it"
    )
