"""The barrier between stages: a stage commits a round only after the other stages have decided their results of that
round.

In the synchronous setting it is run-wide: no stage steps before all hold their averaged gradient. With DiLoCo only
stages that have tied parameters wait for each other. The answers carry squared norms, because clipping goes by the norm
of the whole model.
"""

import asyncio
import logging
import math
from collections.abc import Collection, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass

from swarm.averaging.agreement.blame import AttemptFailed
from swarm.averaging.agreement.place import Place
from swarm.averaging.own_round import OwnRound
from swarm.averaging.roster import leader_of
from swarm.averaging.vectors.shared import TiedParameters
from swarm.averaging.watch import RoundWatch
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import BARRIER, Caller, Members, contact_of, record_of
from swarm.errors import MalformedMessage, SwarmError
from swarm.machine.clock import wait
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.scaling import needs_norm_of_model
from swarm.types import Block, PeerRecord

logger = logging.getLogger(__name__)

RELAYED = 3
"""After this many relayed answers that name no result, the peers that could not be reached are tried again."""
MISTRUSTED = 3
"""After this many answers in a row that a stage is not ready, another one of its peers is asked to relay the question,
because the peer that was asked may not lead its stage any more."""
CONFIRMING = 4
"""How many more members of another stage are asked for the norm of its gradient."""


@dataclass(eq=False)
class Barrier:
    context: Context
    place: Place
    shared: TiedParameters
    watch: RoundWatch
    call: Caller
    own_round: OwnRound

    # -- for this stage ----------------------------------------------------------------------------------------------

    async def before_commit(
        self, round_number: int, prepared: pb.Prepared, holders: Members
    ) -> pb.CommitRequest | None:
        """Note that this stage has decided the round, and wait for the stages that it waits for: with DiLoCo those with
        the same tied parameters, which mostly are none.

        Returns:
            The call that has the holders commit; None if another leader of this stage committed the round meanwhile.

        Raises:
            AttemptFailed: another stage has decided under later amendments.
            IntegrityError: the result was made under amendments that are not known here.
        """
        block, norm, partners = self.context.own.block, prepared.squared_norm, self.shared.partners(round_number)
        shares = [_partner(block, prepared.digest, contact_of(next(iter(holders.values()))))]
        ready: dict[Block, pb.BarrierReply] = {}
        if self.shared.counts_norm(block, round_number):
            # The other stages need this stage's norm, which depends on the partners' averages. So the partners are
            # awaited first: they decide without waiting for this stage.
            first = await self.wait_for(partners, round_number, prepared.amended)
            if first is None:
                return None
            ready |= first
            parts = [*shares, *_partners(ready, partners)]
            norm += await self.shared.squared_norm_of_sum(round_number, parts, prepared.amended)
        self.place.decide(pb.Outcome(round=round_number, prepared=prepared, stage_squared_norm=norm))
        self.context.changes.signal()
        others = await self.wait_for(self.awaited(round_number) - ready.keys(), round_number, prepared.amended)
        if others is None:
            return None
        ready |= others
        norms = {block: norm} | {other: reply.squared_norm for other, reply in ready.items()}
        # Added one by one and in the same order at every stage, so that the total has the same bits. `sum` rounds
        # differently in some releases of Python.
        total_squared_norm = 0.0
        for each in sorted(norms):
            total_squared_norm += norms[each]
        return pb.CommitRequest(
            address=self.context.address, peer_id=self.context.own_id, round=round_number, digest=prepared.digest,
            total_squared_norm=total_squared_norm, stage_squared_norm=norm,
            partners=[*shares, *_partners(ready, partners)] if partners else [], signatures=prepared.signatures,
        )  # fmt: skip

    async def wait_for(
        self, blocks: Collection[Block], round_number: int, amended: str
    ) -> dict[Block, pb.BarrierReply] | None:
        """Wait until every one of these blocks has decided the round. Returns their answers, in the order of blocks.

        There is no deadline: this stage's own result, made under the amendments up to `amended`, is decided, so it
        cannot be given up any more, but for one reason. If another stage has decided under later amendments, no stage
        has committed the round under the earlier ones, or ever will, because each waits for all others to agree.

        Returns:
            None if another leader of this stage committed the round meanwhile.

        Raises:
            AttemptFailed: another stage has decided under later amendments, which are known here now.
        """
        replies: dict[Block, pb.BarrierReply | None] = dict.fromkeys(sorted(blocks))
        later: set[Block] = set()

        async def ask(block: Block) -> None:
            reply = await self._until_ready(block, round_number, amended, later)
            if reply is not None and needs_norm_of_model(self.place.timeline.under(amended)):
                await self._confirm(reply, block, round_number)
            replies[block] = reply

        def waited_for(_: float) -> str:
            late = ", ".join(str(block) for block, reply in replies.items() if reply is None)
            return f"round {round_number} to be averaged at stage {late}" if late else ""

        with self.context.waits.on(waited_for):
            async with asyncio.TaskGroup() as tasks:
                asking = {tasks.create_task(ask(block)) for block in blocks}
                while asking:
                    _, asking = await asyncio.wait(asking, timeout=self.context.timing.awaited_seconds)
                    if asking:
                        await self._train_on(round_number)
        if later:
            raise AttemptFailed(f"stage {min(later)} has decided the round under later amendments", void=True)
        ready = {block: reply for block, reply in replies.items() if reply is not None}
        return ready if len(ready) == len(replies) else None

    async def _train_on(self, round_number: int) -> None:
        """With DiLoCo, let more samples through to the stages that are waited for: these may have too few to end their
        round, and get none while all that this stage has room for waits for its own round's end."""
        async with self.place.lock:
            if self.place.standing.round == round_number:
                await self.watch.member.train_on()

    async def is_passed(self, round_number: int) -> bool:
        """Whether all stages for which this one waits say at once that they have decided the round."""
        timing, result = self.context.timing, self.own_round.result
        amended = self.place.timeline.digest_at(round_number) if result is None else result.prepared.amended
        try:
            async with asyncio.timeout(timing.barrier_seconds + timing.report_seconds):
                return await self.wait_for(self.awaited(round_number), round_number, amended) is not None
        except (TimeoutError, AttemptFailed):
            return False

    def awaited(self, round_number: int) -> Set[Block]:
        config = self.context.config
        if config.rounds.synchronous:
            return set(config.blocks) - {self.context.own.block}
        return self.shared.partners(round_number)

    async def _until_ready(
        self, block: Block, round_number: int, amended: str, later: set[Block]
    ) -> pb.BarrierReply | None:
        """Wait until a block has decided the round under the same amendments. None if that is not waited for any more:
        the round is over here, or some block is in `later`, which have decided under later amendments."""
        hint: PeerRecord | None = None
        unreachable: set[str] = set()
        failed: set[str] = set()
        num_relayed, num_unready = 0, 0
        while self.place.standing.round == round_number and not later:
            target, hint = hint or self._next_to_ask(block, unreachable), None
            is_doubted = num_unready % (MISTRUSTED + 1) == MISTRUSTED
            if is_doubted:
                target = self._another(block, target, num_unready // (MISTRUSTED + 1))
            if target is not None:
                # A peer that failed before gets only a short time, because another one may be ready.
                is_trial = target.peer_id in failed
                wait_seconds = 0.0 if is_trial else self.context.timing.barrier_seconds
                request = pb.BarrierRequest(
                    address=self.context.address_of(block), peer_id=self.context.own_id, round=round_number,
                    wait_seconds=wait_seconds, relay=is_doubted or bool(unreachable), amended=amended,
                )  # fmt: skip
                # A peer that relays the question waits for its leader's answer.
                patience_seconds = wait_seconds + self.context.timing.report_seconds * (1 + request.relay)
                timeout_seconds = self.context.timing.call_seconds if is_trial else patience_seconds
                try:
                    reply = await self.call(target, BARRIER, request, timeout_seconds=timeout_seconds)
                    for norm in (reply.squared_norm, reply.own_squared_norm):
                        if not 0.0 <= norm < math.inf:
                            raise MalformedMessage(f"{target.peer_id} names a squared norm of {norm}")
                    failed.discard(target.peer_id)
                    if reply.ready and reply.amended == amended:
                        return reply
                    if reply.ready and self._is_later(reply, amended):
                        later.add(block)
                        return None
                    num_unready += 1
                    num_relayed += bool(unreachable)
                    if num_relayed >= RELAYED:
                        unreachable.clear()
                        num_relayed = 0
                    if not is_doubted and reply.leader.peer_id not in (target.peer_id, *unreachable):
                        hint = record_of(reply.leader, block)
                except SwarmError as error:
                    logger.debug("stage %s: %s", block, error)
                    unreachable.add(target.peer_id)
                    failed.add(target.peer_id)
                    num_unready += is_doubted
            await self.context.clock.sleep(self.context.timing.retry_seconds)
        return None

    def _is_later(self, reply: pb.BarrierReply, amended: str) -> bool:
        """Take in the amendments of another stage that has decided under others than those up to `amended`. Returns
        whether its were later. Raises IntegrityError if they are not the owner's."""
        timeline = self.place.timeline
        timeline.add(reply.amendments)
        return timeline.number_of(reply.amended) > timeline.number_of(amended)

    async def _confirm(self, reply: pb.BarrierReply, block: Block, round_number: int) -> None:
        """Ask some more members of another stage for the norm of its gradient. If most of them name another one than
        the peer that answered for the stage, that counts: else one member could have all gradients clipped to nothing.

        Of two that differ the smaller one counts, since it clips less. What they do not say within grace_seconds does
        not count. A stage's tied parameters are a part that its leader alone knows.
        """
        asked = [peer for peer_id, peer in self.context.serving(block).items() if peer_id != reply.leader.peer_id]
        first = round_number % max(1, len(asked))
        request = pb.BarrierRequest(
            address=self.context.address_of(block), peer_id=self.context.own_id, round=round_number
        )
        said: list[pb.BarrierReply] = []

        async def ask(peer: PeerRecord) -> None:
            with suppress(SwarmError):
                answer = await self.call(peer, BARRIER, request, timeout_seconds=self.context.timing.grace_seconds)
                if answer.HasField("own_squared_norm") and 0.0 <= answer.own_squared_norm < math.inf:
                    said.append(answer)

        async with asyncio.TaskGroup() as tasks:
            for peer in (asked[first:] + asked[:first])[:CONFIRMING]:
                tasks.create_task(ask(peer))
        # Those that were left out of the attempt may have a result of an earlier one.
        same = [answer for answer in said if answer.digest == reply.digest]
        norms = sorted(answer.own_squared_norm for answer in [reply, *(same or said)])
        middle = norms[(len(norms) - 1) // 2]
        shared = reply.squared_norm - reply.own_squared_norm if self.shared.counts_norm(block, round_number) else 0.0
        if not math.isclose(reply.squared_norm - shared, middle, rel_tol=1e-3):
            logger.warning(
                "%s says that the squared norm of stage %s is %g in round %d, and %s there %g: that counts",
                reply.leader.peer_id, block, reply.squared_norm - shared, round_number,
                "most" if len(norms) > 2 else "another", middle,
            )  # fmt: skip
            reply.squared_norm = middle + max(0.0, shared)

    def _next_to_ask(self, block: Block, unreachable: set[str]) -> PeerRecord | None:
        """The leader among the peers that are not known to be unreachable. If none is left, all peers are considered
        again."""
        serving = self.context.serving(block)
        reachable = serving.keys() - unreachable
        if not reachable:
            unreachable.clear()
        candidates = reachable or serving.keys()
        return serving[leader_of(candidates)] if candidates else None

    def _another(self, block: Block, target: PeerRecord | None, turn: int) -> PeerRecord | None:
        """One of the stage's peers beside `target`: each time the next one."""
        asked_id = target.peer_id if target else ""
        others = [peer for peer_id, peer in self.context.serving(block).items() if peer_id != asked_id]
        return others[turn % len(others)] if others else target

    # -- for another stage -------------------------------------------------------------------------------------------

    async def answer(self, request: pb.BarrierRequest) -> pb.BarrierReply:
        """Answer whether this stage has decided a round. If this peer leads, or relays the question, it waits for the
        decision for a while."""
        clock, own = self.context.clock, contact_of(self.context.present)
        deadline = clock.monotonic() + min(request.wait_seconds, self.context.timing.barrier_seconds)
        if request.round == self.place.standing.round and self.shared.partners(request.round):
            self.place.awaited(clock.monotonic())
        while True:
            if (outcome := self.place.decided(request.round)) is not None:
                return self._ready(request, outcome, own)
            leader, remaining = self.watch.leader_contact(), deadline - clock.monotonic()
            leads = leader.peer_id == own.peer_id
            if request.relay and not leads:
                return await self._ask_leader(leader, request, remaining)
            if remaining <= 0 or not leads:
                result = self.own_round.result
                if result is None or result.round_result.round != request.round:
                    return pb.BarrierReply(leader=leader)
                norm, digest = result.prepared.squared_norm, result.prepared.digest
                return pb.BarrierReply(leader=leader, own_squared_norm=norm, digest=digest)
            await wait(self.context.changes.next, remaining)

    async def _ask_leader(self, leader: pb.Contact, asked: pb.BarrierRequest, seconds: float) -> pb.BarrierReply:
        request = pb.BarrierRequest(
            address=self.context.address, peer_id=self.context.own_id, round=asked.round,
            wait_seconds=max(0.0, seconds), amended=asked.amended,
        )  # fmt: skip
        target = record_of(leader, self.context.own.block)
        timeout_seconds = request.wait_seconds + self.context.timing.report_seconds
        try:
            return await self.call(target, BARRIER, request, timeout_seconds=timeout_seconds)
        except SwarmError as error:
            logger.debug("this peer does not get through to its leader either: %s", error)
            return pb.BarrierReply(leader=leader)

    def _ready(self, request: pb.BarrierRequest, outcome: pb.Outcome, own: pb.Contact) -> pb.BarrierReply:
        prepared = outcome.prepared
        return pb.BarrierReply(
            ready=True, squared_norm=outcome.stage_squared_norm, own_squared_norm=prepared.squared_norm,
            digest=prepared.digest, leader=own, amended=prepared.amended,
            amendments=self.place.timeline.texts if prepared.amended != request.amended else (),
        )  # fmt: skip


def _partner(block: Block, digest: str, contact: pb.Contact) -> pb.Partner:
    return pb.Partner(stage=block.stage, variant=block.variant, digest=digest, contact=contact)


def _partners(ready: Mapping[Block, pb.BarrierReply], blocks: Collection[Block]) -> list[pb.Partner]:
    return [_partner(block, ready[block].digest, ready[block].leader) for block in sorted(blocks)]
