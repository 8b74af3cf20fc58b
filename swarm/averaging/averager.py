"""LOOP 3: keeps one stage's peers at the same weights, round by round.

Three things go on at once. This peer reports its progress to the peer that it takes
for the leader. If it is the leader itself, it watches the reports and leads the attempts. If it finds itself behind, it
downloads the state. It never touches weights: it asks the stage to do that.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from swarm.averaging.advance import Advance
from swarm.averaging.agreement import messages
from swarm.averaging.agreement.blame import Blame
from swarm.averaging.agreement.branches import Branches
from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.pace import Entry
from swarm.averaging.agreement.place import Phase, Place
from swarm.averaging.barrier import Barrier
from swarm.averaging.catch_up import CatchUp
from swarm.averaging.donor import Donor
from swarm.averaging.leadership import LeadLoop, Succession
from swarm.averaging.missed_rounds import MissedRounds
from swarm.averaging.own_round import OwnRound
from swarm.averaging.participant import Participant
from swarm.averaging.reporter import Reporter, Survey
from swarm.averaging.roster import Roster
from swarm.averaging.round import Round
from swarm.averaging.servicer import Handlers
from swarm.averaging.state_transfer import StateTransfer
from swarm.averaging.vectors.shared import TiedParameters
from swarm.averaging.watch import GroupView, RoundWatch
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import Broadcast, Method, Reply, Request
from swarm.errors import DeadlineExceeded, NotReady, PeerUnavailable
from swarm.machine.clock import wait
from swarm.rpc.v1.stage_pb2 import AveragingCounters
from swarm.training.round_member import RoundMember
from swarm.types import Block, PeerId, PeerRecord


@dataclass(eq=False)
class Calls:
    """A Caller, see averaging/wire/transport."""

    context: Context
    roster: Roster
    participant: Participant
    """Answers the calls that this peer, as the leader, makes to itself."""

    async def __call__(
        self, peer: PeerRecord, method: Method[Request, Reply], request: Request, *, timeout_seconds: float
    ) -> Reply:
        """Call a peer, or this one, which may serve other blocks too. A peer of this block that cannot be reached is
        suspected.

        Raises the error that the peer answers with, PeerUnavailable or DeadlineExceeded.
        """
        if peer.peer_id == self.context.own_id:
            return await self._ask_itself(peer.block, method, request, timeout_seconds)
        try:
            return await self.context.transport.call(peer, method, request, timeout_seconds=timeout_seconds)
        except (PeerUnavailable, NotReady) as error:
            if peer.block == self.context.own.block:
                is_gone = isinstance(error, PeerUnavailable) and error.is_gone
                self.roster.suspect(PeerId(peer.peer_id), is_gone=is_gone)
                self.context.changes.signal()  # Other parts need not wait for that peer any more.
            raise

    async def _ask_itself(
        self, block: Block, method: Method[Request, Reply], request: Request, timeout_seconds: float
    ) -> Reply:
        if block == self.context.own.block:
            answer = self.participant.answers.get(method.name)
        else:
            other = self.context.own_block(block)
            answer = None if other is None else partial(other.handle, method)
        if answer is None:
            # Somebody takes this peer for one of another stage, or has not heard yet that it has moved.
            raise PeerUnavailable(f"this peer does not answer {method.name} to itself")
        try:
            async with asyncio.timeout(timeout_seconds):
                reply: Reply = await answer(request)
        except TimeoutError:
            raise DeadlineExceeded(f"{method.name} took longer than {timeout_seconds:.1f} s here") from None
        self.context.changes.signal()
        return reply


def place_of(context: Context, standing: Standing) -> Place:
    config = context.config
    branches = Branches(standing, config, context.clock, context.timing, lambda: context.other_blocks)
    return Place(standing, branches, context.timeline, num_fragments=config.averaging.num_fragments)


class Averager:
    """One peer's part in its stage's rounds. Its parts are built one after the other, each from those before it.
    `handlers` answer the calls of other peers."""

    def __init__(self, context: Context, member: RoundMember) -> None:
        """`member` is the stage, as averaging sees it."""
        self.context = context
        self.place = place = place_of(context, messages.standing_of(member.progress()))
        self.roster = roster = Roster(context, place)
        self.donor = donor = Donor(place, member, context.clock, context.turns)
        self.shared = shared = TiedParameters(context)
        self.own_round = own_round = OwnRound(context, place, member)
        tally = member.progress().tally
        named = tally.named(tally.signatures.values(), context.config.run_id, context.own.block)
        own_round.exchanges.suspects.take_over(named)
        advance = Advance(context, place, member, own_round, shared=shared, donor=donor, roster=roster)
        participant = Participant(context, place, own_round, advance, shared, roster)
        call = Calls(context, roster, participant)
        survey = Survey(context, place, member, roster, advance, call)
        transfer = StateTransfer(
            context.transport, context.address, context.own_id, context.waits, context.clock,
            silence_seconds=context.timing.silence_seconds,
        )  # fmt: skip
        entry = Entry(context.config, context.peers, member)
        missed_rounds = MissedRounds(context, place, advance, transfer, survey, entry)
        self.catch_up = CatchUp(
            context, place, advance=advance, transfer=transfer, survey=survey, entry=entry, missed_rounds=missed_rounds
        )
        self.reporter = reporter = Reporter(context, place, member, roster, own_round, survey, self.catch_up.look)
        self.watch = watch = RoundWatch(context, place, member, roster, reporter)
        barrier = Barrier(context, place, shared, watch, call, own_round)
        self.succession = Succession(context, place, member, roster, survey, own_round, barrier, watch)
        broadcast = Broadcast(call=call, is_silent=roster.is_silent, timing=context.timing)
        blame = Blame(context.own_id, own_round.exchanges.suspects)
        attempts = Round(context, place, watch, broadcast, barrier, blame)
        self.lead_loop = LeadLoop(context, place, roster, own_round, reporter, watch, attempts)
        self.handlers = Handlers(context, participant, donor, shared, barrier, watch)

    async def run(self) -> None:
        """Take part until cancelled. A peer that leaves need not tell the others: they go on without it."""
        tasks = self.context.tasks
        async with tasks.running():
            tasks.spawn(self.reporter.run())
            tasks.spawn(self.lead_loop.run())
            tasks.spawn(self.donor.run())
            tasks.spawn(self.succession.run())

    def notify(self) -> None:
        self.context.changes.notify()

    async def join(self) -> None:
        """Ask every known peer where the run is, and download its state if this peer is behind; needs `run`."""
        await self.reporter.ask_all()

    async def arrived(self) -> None:
        """Wait until this peer is where its group is. After a failed try, wait no longer than members wait for a
        missing member.

        If `join` failed, for example because the line was busy, the answers to the next reports make this peer try
        again.
        """
        await self.catch_up.arrived()

    async def changed(self, seconds: float) -> None:
        """Wait until the view, or the state of a round, may have changed, but no longer than `seconds`."""
        await wait(self.context.changes.next, seconds)

    def view(self) -> GroupView:
        return self.watch.view()

    @property
    def leads(self) -> bool:
        return self.watch.leader_id == self.context.own_id

    @property
    def vain_seconds(self) -> float:
        return self.catch_up.vain_seconds

    @property
    def obstacle(self) -> str:
        """Why this peer does not get to where others say that they are; empty if nothing is known that hinders it."""
        return self.catch_up.fault or "; ".join(self.place.branches.refusals)

    @property
    def is_sound(self) -> bool:
        """False while this peer has a wrong state, which it got from others."""
        return self.place.is_sound

    @property
    def is_behind(self) -> bool:
        return self.place.is_catching_up

    @property
    def is_exchanging(self) -> bool:
        """Whether an exchange is under way, to which other traffic on this peer's line gives way."""
        return self.place.group.phase is Phase.EXCHANGING

    @property
    def last_members(self) -> Collection[str]:
        """Ids of the members of the last committed round; empty where this peer does not know them."""
        return self.place.last_members

    def misses_member(self) -> bool:
        return self.roster.misses_member()

    def awaits_reports(self) -> bool:
        return self.roster.awaits_reports()

    @property
    def num_alive(self) -> int:
        return max(self.reporter.num_alive, len(self.roster.alive()))

    def counters(self) -> AveragingCounters:
        return AveragingCounters(
            attempts=self.lead_loop.num_attempts,
            aborted=self.lead_loop.aborted,
            downloads=self.catch_up.num_downloads,
            refusals=[*self.place.branches.refusals, *self.own_round.exchanges.suspects.lines],
        )
