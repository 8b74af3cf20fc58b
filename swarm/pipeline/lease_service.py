"""Both ends of the lease call: a stage peer's servicer and a trainer's client.

The servicer grants from its table if its peer leads the stage, and otherwise names the leader. The client finds the
leader, and renews the leases that it was granted by asking again.
"""

import dataclasses
import itertools
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.config import RunConfig
from swarm.errors import IncompatibleVersion, MalformedMessage, NotAllowed, SwarmError, TryAnotherPeer, TryLater
from swarm.events import Events
from swarm.events import Grant as GrantEvent
from swarm.hop.answers import Obstacle, left_alone
from swarm.machine.clock import Clock
from swarm.pipeline.leases import Grant, LeaseTable, RoundView
from swarm.pipeline.trainers import Trainer
from swarm.routing.peer_queue import LeftAlone
from swarm.rpc.ask import address_of, ask
from swarm.rpc.callers import Quota, caller_of, token_or_address_of
from swarm.rpc.channels import ChannelPool
from swarm.rpc.failures import answers_errors
from swarm.rpc.serving import check_address
from swarm.rpc.v1 import lease_pb2 as pb
from swarm.rpc.v1.lease_pb2_grpc import LeaseServiceServicer, LeaseServiceStub
from swarm.types import Block, PeerId, PeerRecord, PeerState

MAX_COUNT = 1024
MAX_WAIT_SECONDS = 5.0
MAX_ID_LENGTH = 64
MAX_NAMED = 1 << 14
"""The most microbatches that one request may name as held, as released or as acknowledged."""
MAX_WAITING = 64
"""The most requests of one caller that wait at one time; an honest trainer has one or two. Further ones are answered
without a wait."""
ANSWER_SECONDS = 3.0
"""Longest wait for an answer, beyond the wait that was asked for."""
FAILED_SECONDS = 0.5
"""A peer that failed within this time is not asked again, even if others still name it as the leader. They will soon
notice that it is gone, and then one of them leads. That is faster than waiting for an answer that may not come."""
MOST_FAILED = 4096
"""The most peers whose failures are remembered. Those whose failure is longest ago are forgotten."""
DOUBT_SECONDS = 10.0
"""A leader that has granted nothing for this long may have been passed over by its group without knowing it. So the
stage's other peers are asked who leads, each time that this has passed."""
LOOK_SECONDS = 0.1
"""A request that waits is tried again after this time even if nothing happened: some grants only take time."""
GAP_SECONDS = 0.03
"""Least time between two tries, so that several changes in quick succession lead to one try."""


@answers_errors
@dataclass(eq=False)
class LeaseServicer(LeaseServiceServicer):
    config: RunConfig
    block: Block
    clock: Clock
    rng: random.Random
    lead: Callable[[], RoundView | PeerId]
    """Gives this peer's view of the round if it leads its group, and otherwise the leader."""
    changed: Callable[[float], Awaitable[None]]
    """Waits until the result of `lead` may have changed, but no longer than the given seconds."""
    events: Events = field(default_factory=Events)
    _table: LeaseTable | None = field(default=None, init=False)
    _waiting: Quota = field(default_factory=lambda: Quota("requests", each=MAX_WAITING), init=False)

    async def Acquire(self, request: pb.AcquireRequest, context: Any) -> pb.AcquireReply:
        self._check(request)
        caller, trainer = caller_of(context), Trainer(token_or_address_of(context), request.trainer_id)
        if request.wait_seconds <= 0 or not self._waiting.fits(caller):
            return await self._answer(request, trainer, 0.0)
        with self._waiting.taken(caller):
            return await self._answer(request, trainer, min(MAX_WAIT_SECONDS, request.wait_seconds))

    async def _answer(self, request: pb.AcquireRequest, trainer: Trainer, wait_seconds: float) -> pb.AcquireReply:
        deadline = self.clock.monotonic() + wait_seconds
        while True:
            looked_at = self.clock.monotonic()
            view = self.lead()
            if not isinstance(view, RoundView):
                # Another peer leads and grants from its own table. If this peer leads again, its own table is out of
                # date.
                self._table = None
                return pb.AcquireReply(leader_peer_id=view)
            grant = self._grant(view, request, trainer)
            if grant.microbatches or request.count == 0 or self.clock.monotonic() >= deadline:
                return pb.AcquireReply(
                    microbatches=grant.microbatches, round=view.round, round_complete=view.complete,
                    accumulate_only_at=grant.accumulate_only_at, round_granted=grant.all_granted,
                    counted=[microbatch for microbatch in request.holding if microbatch in view.committed],
                )  # fmt: skip
            await self.changed(LOOK_SECONDS)
            await self.clock.sleep(max(0.0, looked_at + GAP_SECONDS - self.clock.monotonic()))

    def _grant(self, view: RoundView, request: pb.AcquireRequest, trainer: Trainer) -> Grant:
        if self._table is None:
            self._table = LeaseTable(self.config, self.block, self.clock, self.rng)
        # If stage 0 has not begun this round yet, this stage lacks all microbatches, and no trainer can run them.
        too_new = request.HasField("newest_round") and view.round > request.newest_round
        is_first, is_older = self.block.stage == 0, view.round < request.newest_round
        paths = request.paths or itertools.cycle(self.config.paths_through(self.block))
        grant = self._table.acquire(
            view, trainer, [*itertools.islice(paths, 0 if too_new else min(MAX_COUNT, request.count))],
            holding=set(request.holding), released=set(request.released), acknowledged=set(request.acknowledged),
            all_granted=is_first or is_older or request.newest_is_granted,
            all_committed=is_first or is_older or request.newest_is_complete,
        )  # fmt: skip
        if grant.accumulate_only_at is not None:
            self.events.write(GrantEvent(microbatches=tuple(grant.microbatches), trainer=request.trainer_id))
        return grant

    def _check(self, request: pb.AcquireRequest) -> None:
        check_address(request.address, run_id=self.config.run_id, block=self.block)
        named = max(len(request.holding), len(request.released), len(request.acknowledged))
        if named > MAX_NAMED or len(request.trainer_id) > MAX_ID_LENGTH:
            raise MalformedMessage(f"a request names at most {MAX_NAMED} microbatches, and a trainer's id is short")
        if len(request.paths) > MAX_COUNT or not {*request.paths} <= {*self.config.paths_through(self.block)}:
            raise MalformedMessage(f"a request names at most {MAX_COUNT} paths, which lead through stage {self.block}")


@dataclass(eq=False)
class LeaseClient:
    config: RunConfig
    trainer_id: str
    peers: Callable[[Block], Sequence[PeerRecord]]
    channels: ChannelPool
    clock: Clock
    _leaders: dict[Block, PeerId] = field(default_factory=dict, init=False)
    _believed_at: dict[Block, float] = field(default_factory=dict, init=False)
    """By block: when its leader last granted something, or was doubted."""
    _failed_at: dict[PeerId, float] = field(default_factory=dict, init=False)
    _failed: dict[Block, Sequence[LeftAlone]] = field(default_factory=dict, init=False)
    """By block: the peers that failed when its leader was last looked for, if it was not found."""

    async def acquire(
        self, block: Block, paths: Sequence[int], *, holding: Collection[int], released: Collection[int],
        wait_seconds: float, acknowledged: Collection[int] = (), newest: pb.AcquireReply | None = None,
    ) -> pb.AcquireReply | None:  # fmt: skip
        """Ask the leader of a block for a microbatch for each entry of `paths`, and renew those in `holding`; None if
        no leader was reached.

        `acknowledged` are microbatches that this trainer has lately acknowledged to stage 0, or is about to. A later
        stage that gets stage 0's `newest` answer grants nothing of a round that stage 0 has not begun.

        Raises NotAllowed or IncompatibleVersion if every peer of the stage refused so, and MalformedMessage.
        """
        request = pb.AcquireRequest(
            address=address_of(self.config.run_id, block), trainer_id=self.trainer_id, count=len(paths),
            wait_seconds=wait_seconds, holding=holding, released=released, acknowledged=acknowledged,
            paths=paths[:MAX_COUNT] if len(self.config.paths) > 1 else (),
        )  # fmt: skip
        if newest is not None:
            request.newest_round = newest.round
            request.newest_is_granted, request.newest_is_complete = newest.round_granted, newest.round_complete
        asked: set[str] = set()
        doubted, has_answer = self._doubted(block), False
        faults = list[tuple[PeerRecord, SwarmError]]()
        while (record := self._next_to_ask(block, asked, doubted)) is not None:
            if has_answer and self._has_failed(record):
                return None
            asked.add(record.peer_id)
            try:
                reply = await self._ask(record, request, wait_seconds + ANSWER_SECONDS)
            except (TryAnotherPeer, TryLater) as error:
                self._leaders.pop(block, None)
                self._note_failure(PeerId(record.peer_id))
                faults.append((record, error))
                self._failed[block] = [left_alone(*fault, self.clock.monotonic()) for fault in faults]
                continue
            self._failed_at.pop(PeerId(record.peer_id), None)
            if not reply.leader_peer_id:
                if reply.microbatches or not paths:
                    self._believed_at[block] = self.clock.monotonic()
                self._leaders[block] = PeerId(record.peer_id)
                self._failed.pop(block, None)
                return reply
            self._leaders[block] = PeerId(reply.leader_peer_id)
            has_answer = True
        # One peer's clock may be wrong, or another release may have its port, so only a refusal by all of them counts.
        refusals = [fault for _, fault in faults if isinstance(fault, NotAllowed | IncompatibleVersion)]
        if refusals and len(refusals) == len(asked):
            raise refusals[-1]
        return None

    def obstacle(self, block: Block) -> Obstacle:
        num_serving = sum(record.state is PeerState.SERVING for record in self.peers(block))
        if not num_serving:
            return Obstacle(num_peers=0)
        failed = Obstacle.of(self._failed.get(block, ()), self.clock.monotonic(), num_peers=num_serving)
        return dataclasses.replace(failed, seconds=FAILED_SECONDS, causes=failed.causes or "no leader yet")

    def _doubted(self, block: Block) -> PeerId | None:
        """The leader of a block, which is forgotten, if it has granted nothing for DOUBT_SECONDS."""
        now = self.clock.monotonic()
        if now - self._believed_at.setdefault(block, now) < DOUBT_SECONDS:
            return None
        self._believed_at[block] = now
        return self._leaders.pop(block, None)

    def _next_to_ask(self, block: Block, asked: Collection[str], doubted: PeerId | None) -> PeerRecord | None:
        candidates = [record for record in self.peers(block) if record.peer_id not in asked]
        leader = self._leaders.get(block)

        def order(record: PeerRecord) -> tuple[bool, bool, bool, float, str]:
            # Each request to a frozen peer costs a timeout. So peers that answered, or whose failure is longest ago,
            # come first. A doubted leader is asked at once where others still name it, and else last.
            failed_at = self._failed_at.get(PeerId(record.peer_id), float("-inf"))
            is_doubted = record.peer_id == doubted
            return self._has_failed(record), record.peer_id != leader, is_doubted, failed_at, record.peer_id

        return min(candidates, key=order, default=None)

    def _note_failure(self, peer_id: PeerId) -> None:
        self._failed_at.pop(peer_id, None)
        self._failed_at[peer_id] = self.clock.monotonic()
        if len(self._failed_at) > MOST_FAILED:
            del self._failed_at[next(iter(self._failed_at))]

    def _has_failed(self, record: PeerRecord) -> bool:
        """Whether a peer failed within FAILED_SECONDS and has not answered since."""
        failed_at = self._failed_at.get(PeerId(record.peer_id), float("-inf"))
        return self.clock.monotonic() - failed_at < FAILED_SECONDS

    async def _ask(self, record: PeerRecord, request: pb.AcquireRequest, seconds: float) -> pb.AcquireReply:
        stub: Any = LeaseServiceStub(self.channels.channel(record))
        reply: pb.AcquireReply = await ask(stub.Acquire, request, seconds=seconds)
        return reply
