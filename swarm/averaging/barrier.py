"""The barrier between stages: a stage commits a round only after the other stages have decided their results of that
round.

In the synchronous setting it is run-wide: no stage steps before all hold their averaged gradient. With DiLoCo only
stages that share a block wait for each other. The answers carry squared norms, because clipping goes by the norm of the
whole model.
"""

import asyncio
import logging
import math
from collections.abc import Collection
from dataclasses import dataclass

from swarm.averaging.agreement.place import Place
from swarm.averaging.agreement.rules import leader_of
from swarm.averaging.vectors.shared import SharedBlocks
from swarm.averaging.watch import RoundWatch
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import BARRIER, Caller, contact_of, record_of
from swarm.errors import MalformedMessage, SwarmError
from swarm.machine.tasks import wait
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerRecord, PeerState

logger = logging.getLogger(__name__)

RELAYED = 3
"""After this many relayed answers that name no result, the peers that could not be reached are tried again."""


@dataclass(eq=False)
class Barrier:
    """One stage's side of the barrier: it asks other stages, and answers them."""

    context: Context
    place: Place
    shared: SharedBlocks
    watch: RoundWatch
    call: Caller

    # -- for this stage ----------------------------------------------------------------------------------------------

    async def wait_for(self, stages: Collection[int], round_number: int) -> dict[int, pb.BarrierReply] | None:
        """Wait until every one of these stages has decided the round. Returns their answers, in the order of stages.

        There is no deadline: this stage's own result is decided, so it cannot be given up any more.

        Returns:
            None if another leader of this stage committed the round meanwhile.
        """
        replies: dict[int, pb.BarrierReply | None] = dict.fromkeys(sorted(stages))

        async def ask(stage: int) -> None:
            replies[stage] = await self._until_ready(stage, round_number)

        def waited_for(_: float) -> str:
            late = ", ".join(str(stage) for stage, reply in replies.items() if reply is None)
            return f"round {round_number} to be averaged at stage {late}" if late else ""

        with self.context.waits.on(waited_for):
            async with asyncio.TaskGroup() as tasks:
                for stage in stages:
                    tasks.create_task(ask(stage))
        ready = {stage: reply for stage, reply in replies.items() if reply is not None}
        return ready if len(ready) == len(replies) else None

    async def _until_ready(self, stage: int, round_number: int) -> pb.BarrierReply | None:
        hint: PeerRecord | None = None
        unreachable: set[str] = set()
        failed: set[str] = set()
        num_relayed = 0
        while self.place.standing.round == round_number:
            target, hint = hint or self._next_to_ask(stage, unreachable), None
            if target is not None:
                # A peer that failed before gets only a short time, because another one may be ready.
                is_trial = target.peer_id in failed
                wait_seconds = 0.0 if is_trial else self.context.timing.barrier_seconds
                request = pb.BarrierRequest(
                    address=self.context.address_of(stage),
                    peer_id=self.context.own_id,
                    round=round_number,
                    wait_seconds=wait_seconds,
                    relay=bool(unreachable),
                )
                # A peer that relays the question waits for its leader's answer.
                patience_seconds = wait_seconds + self.context.timing.report_seconds * (1 + request.relay)
                timeout_seconds = self.context.timing.call_seconds if is_trial else patience_seconds
                try:
                    reply = await self.call(target, BARRIER, request, timeout_seconds=timeout_seconds)
                    if not (math.isfinite(reply.squared_norm) and reply.squared_norm >= 0.0):
                        raise MalformedMessage(f"{target.peer_id} names a squared norm of {reply.squared_norm}")
                    failed.discard(target.peer_id)
                    if reply.ready:
                        return reply
                    num_relayed += request.relay
                    if num_relayed >= RELAYED:
                        unreachable.clear()
                        num_relayed = 0
                    if reply.leader.peer_id not in (target.peer_id, *unreachable):
                        hint = record_of(reply.leader, stage)
                except SwarmError as error:
                    logger.debug("stage %d: %s", stage, error)
                    unreachable.add(target.peer_id)
                    failed.add(target.peer_id)
            await self.context.clock.sleep(self.context.timing.retry_seconds)
        return None

    def _next_to_ask(self, stage: int, unreachable: set[str]) -> PeerRecord | None:
        """The leader among the peers that are not known to be unreachable. If none is left, all peers are considered
        again."""
        serving = [record for record in self.context.peers(stage) if record.state is PeerState.SERVING]
        reachable = [record for record in serving if record.peer_id not in unreachable]
        if not reachable:
            unreachable.clear()
        by_id = {record.peer_id: record for record in reachable or serving}
        return by_id[leader_of(by_id)] if by_id else None

    # -- for another stage -------------------------------------------------------------------------------------------

    async def answer(self, request: pb.BarrierRequest) -> pb.BarrierReply:
        """Answer whether this stage has decided a round. If this peer leads, or relays the question, it waits for the
        decision for a while."""
        clock, own = self.context.clock, contact_of(self.context.present)
        deadline = clock.monotonic() + min(request.wait_seconds, self.context.timing.barrier_seconds)
        if request.round == self.place.standing.round and self.shared.partners(request.round):
            self.place.awaited(clock.monotonic())
        while True:
            outcome, decision = self.place.outcomes.get(request.round), self.place.decision
            if outcome is not None:
                norm, digest = outcome.stage_squared_norm, outcome.prepared.digest
                return pb.BarrierReply(ready=True, squared_norm=norm, digest=digest, leader=own)
            if decision is not None and decision.round == request.round:
                norm, digest = decision.squared_norm, decision.prepared.digest
                return pb.BarrierReply(ready=True, squared_norm=norm, digest=digest, leader=own)
            leader, remaining = self.watch.leader_contact(), deadline - clock.monotonic()
            leads = leader.peer_id == own.peer_id
            if request.relay and not leads:
                return await self._ask_leader(leader, request.round, remaining)
            if remaining <= 0 or not leads:
                return pb.BarrierReply(leader=leader)
            await wait(self.context.changes.next, remaining)

    async def _ask_leader(self, leader: pb.Contact, round_number: int, seconds: float) -> pb.BarrierReply:
        request = pb.BarrierRequest(
            address=self.context.address,
            peer_id=self.context.own_id,
            round=round_number,
            wait_seconds=max(0.0, seconds),
        )
        target = record_of(leader, self.context.own.stage)
        timeout_seconds = request.wait_seconds + self.context.timing.report_seconds
        try:
            return await self.call(target, BARRIER, request, timeout_seconds=timeout_seconds)
        except SwarmError as error:
            logger.debug("this peer does not get through to its leader either: %s", error)
            return pb.BarrierReply(leader=leader)
