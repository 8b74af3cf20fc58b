"""One block as a process serves it: its stage, its part in the averages, its state, its record and its checkpoints.

It is served only once its state is here, and announced only once it is served: get the state -> announce, average,
write checkpoints -> drain -> leave. What the blocks of a process share is in own_process.py and server.py.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from peers.shared.network import LOOK_SECONDS, Membership
from peers.stage_peer.news import StageNews
from peers.stage_peer.own_process import OwnProcess
from peers.stage_peer.own_stage import ServerOptions, warm_up
from peers.stage_peer.own_state import OwnState
from peers.stage_peer.presence import Presence, TimeWatch
from peers.status.peer_row import PeerRow
from swarm.averaging.averager import Averager
from swarm.averaging.servicer import AveragingServicer, Handlers
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import Transport
from swarm.checkpoint.writer import Checkpoints
from swarm.events import Join
from swarm.hop.hop import Hop
from swarm.hop.retries import HopContext, HopLimits
from swarm.machine.words import about
from swarm.pipeline.lease_service import LeaseServicer
from swarm.pipeline.leases import RoundView
from swarm.rpc.dispatch import BlockHandlers, Dispatch
from swarm.rpc.local import LocalBlock
from swarm.rpc.transfers import Turns
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.averaging_pb2_grpc import add_AveragingServiceServicer_to_server
from swarm.rpc.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from swarm.rpc.v1.lease_pb2_grpc import add_LeaseServiceServicer_to_server
from swarm.rpc.wire import add_stage_servicer
from swarm.stage.backend import StageBackend
from swarm.stage.context import StageContext, StageLimits
from swarm.stage.generation import GenerationServicer, SessionLimits
from swarm.stage.member import StageMember
from swarm.stage.runtime import Runtime
from swarm.stage.servicer import StageServicer
from swarm.stage.spot_check import SpotCheck
from swarm.stage.stage import Stage
from swarm.types import Block, PeerId, PeerRecord, PeerState

SETTLE_SECONDS = 5.0
"""How long a peer that ends waits at most until it has passed on its acknowledgements. Passing on one takes no longer
than this."""


class ServedBlock:
    def __init__(
        self, membership: Membership, block: Block, backend: StageBackend, runtime: Runtime, tasks: asyncio.TaskGroup,
        options: ServerOptions, limits: StageLimits, process: OwnProcess,
    ) -> None:  # fmt: skip
        config = membership.config
        hops = {
            following: Hop(
                HopContext(
                    run_id=config.run_id, block=following, router=membership.known.router, own=self._local,
                    channels=membership.channels, clock=membership.clock, limits=HopLimits.of(config, following),
                ),
                events=options.events, memory=backend.staging.host_bytes,
                check_share=config.rounds.check_share, drifts=not config.rounds.synchronous,
                encodings_in=lambda round_number: backend.boundary_in(round_number).encodings,
            )
            for following in config.neighbours(block, 1)
        }  # fmt: skip
        self._membership = membership
        self._options = options
        self._process = process
        self.stage = Stage(
            StageContext(
                config=config, backend=backend, runtime=runtime, hops=hops, clock=membership.clock, tasks=tasks,
                limits=limits, variant=block.variant,
            )
        )  # fmt: skip
        self.member = StageMember(self.stage, num_alive=lambda: self.averager.num_alive, on_commit=self._committed)
        self.averager: Averager
        self.local: LocalBlock
        self.checkpoints = Checkpoints(
            options.checkpoints, config, block, self.member, self.member.timeline, tasks,
            highest_microbatch=lambda: self.averager.view().highest_microbatch,
        )  # fmt: skip
        self._own_state = OwnState(membership, self.stage, self.member, options)
        self._news = StageNews(membership.clock)
        sessions = SessionLimits(
            max_sessions=options.given.max_sessions, max_bytes=options.given.session_memory_mib << 20
        )
        self._generation = GenerationServicer(self.stage, sessions)
        times = TimeWatch(self.stage, membership.clock, peak_flops=options.peak_flops)
        self.presence = Presence(membership, self.stage, self.member, options, process, times)

    async def begin(self) -> None:
        """Compute for the first time, and take a checkpoint's state if there is one to be taken. Raises what
        OwnState.begin does."""
        context = self.stage.context
        with self._membership.waits.on(f"the first computation of stage {self.stage.block}"):
            await warm_up(
                context.backend, context.runtime, self._membership.clock, device=self._options.device,
                compiles=self._options.compiles, texts=self._generation.warm_up,
            )  # fmt: skip
        await self._own_state.begin(self._process.described())

    @asynccontextmanager
    async def serving(self, dispatch: Dispatch, turns: Turns) -> AsyncIterator[None]:
        """Get the block's state, and serve the block inside. `begin` comes before.

        Raises in a group NotReady if the state could not be downloaded from the peers that hold it.
        """
        self.averager = Averager(self._context(turns), self.member)
        servicer = StageServicer(
            self.stage, describe=self.describe, callers=self._process.callers, rival_of=self._process.rivals.of,
            spot_check=SpotCheck(
                self.stage, peers=self._peers, channels=self._membership.channels,
                sign=self._membership.identity.sign_with_point,
            ),
        )  # fmt: skip
        self.local = LocalBlock(servicer, self._generation, self._options.prefix)
        dispatch.add(self.stage.block, self._handlers(servicer))
        self._process.blocks[self.stage.block] = self
        waits = self._membership.waits
        try:
            async with asyncio.TaskGroup() as tasks:
                with about(self._options.prefix):
                    averaging = tasks.create_task(self.averager.run())
                    reporting = tasks.create_task(self.stage.endings.report_changes(self.averager.notify))
                await asyncio.sleep(0)
                await self._own_state.arrive(self.averager)
                await self.averager.arrived()
                self.stage.admission.open()
                await self.presence.become(PeerState.SERVING)
                self._options.events.write(Join())
                hops = (hop.run() for hop in self.stage.context.hops.values())
                works = (*self.presence.works(self._news), *hops, self._watch_leadership())
                with about(self._options.prefix):
                    background = [tasks.create_task(work) for work in works]
                with waits.on(self._waits_for_round), waits.on(self._waits_for_stage):
                    yield
                for task in (averaging, reporting, *background):
                    task.cancel()
        finally:
            self.stage.end()
            await self.local.stop(1.0)
            dispatch.remove(self.stage.block)
            self._process.blocks.pop(self.stage.block, None)
            self._membership.directory.lead(self.stage.block, leads=False)

    def _handlers(self, servicer: StageServicer) -> BlockHandlers:
        """The block's services on the gRPC server."""
        lease = LeaseServicer(
            config=self._membership.config, block=self.stage.block, clock=self._membership.clock,
            rng=random.SystemRandom(), lead=lambda: group_lead(self.averager), changed=self.averager.changed,
            events=self._options.events,
        )  # fmt: skip
        handlers = BlockHandlers(self._options.prefix)
        server: Any = handlers
        add_stage_servicer(servicer, server)
        add_GenerationServiceServicer_to_server(self._generation, server)
        add_LeaseServiceServicer_to_server(lease, server)
        add_AveragingServiceServicer_to_server(AveragingServicer(self.averager.handlers), server)
        return handlers

    def describe(self) -> pb.DescribeReply:
        return self.presence.describe(self.averager, self._generation.counters())

    def figures(self) -> PeerRow:
        return PeerRow.of(self.presence.record(), self.describe())

    def _context(self, turns: Turns) -> Context:
        member = self._membership
        return Context(
            config=member.config, own=self.presence.record(), endpoints=lambda: self._process.announced.endpoints,
            peers=self._peers, transport=Transport(member.channels), clock=member.clock, events=self._options.events,
            waits=member.waits, turns=turns, own_block=self._beside, known_amendments=self.member.timeline,
            sign=member.identity.sign_with_point,
        )  # fmt: skip

    def _peers(self, block: Block) -> Sequence[PeerRecord]:
        """The peers of a block, as the DHT last showed them, and this process as it is now if it serves that too."""
        known, beside = self._membership.known.peers(block), self._process.blocks.get(block)
        if beside is None or beside is self:
            return known
        own_id = self._membership.peer_id
        return [beside.presence.record(), *(record for record in known if record.peer_id != own_id)]

    def _local(self, record: PeerRecord) -> LocalBlock | None:
        """The block that a record announces, if this process serves it."""
        block = self._process.blocks.get(record.block)
        return block.local if block is not None and record.peer_id == self._membership.peer_id else None

    def _beside(self, block: Block) -> Handlers | None:
        beside = self._process.blocks.get(block)
        return None if beside is None else beside.averager.handlers

    async def _watch_leadership(self) -> None:
        """Tell the directory whether this peer leads the block's rounds: then it has to know all of the block's
        peers."""
        while True:
            self._membership.directory.lead(self.stage.block, self.averager.leads)
            await self._membership.clock.sleep(LOOK_SECONDS)

    # -- the end ---------------------------------------------------------------------------------------------------

    async def end_of_round(self, seconds: float, *, quiet_seconds: float) -> None:
        """Serve until the present round is closed, and wait for its commit. Call `drain` next.

        Returns sooner if `seconds` have passed, if this peer has no samples in the round, if without it no path through
        the block has peers at each of its blocks, this one included, or if nothing has been under way here for
        `quiet_seconds` while all members are there: then no trainer trains.
        """
        with self._membership.waits.on(f"the end of round {self.stage.round}, to leave after it"):
            await self._end_of_round(seconds, quiet_seconds)

    async def _end_of_round(self, seconds: float, quiet_seconds: float) -> None:
        number, clock = self.stage.round, self._membership.clock
        busy_at, deadline = clock.monotonic(), clock.monotonic() + seconds
        while (
            self.stage.round == number
            and (self.member.progress().num_samples > 0 or self.stage.is_busy)
            and self._may_end_without()
        ):
            closed = self.stage.is_closed
            # A microbatch that comes between the close and the commit belongs to the next round, and would be lost with
            # this peer.
            if closed:
                self.stage.admission.close()
            else:
                self.stage.admission.open()
            now = clock.monotonic()
            if closed or self.stage.is_busy or self.averager.misses_member():
                # While a round waits for a silent member, nothing is under way although somebody trains.
                busy_at = now
            quiet = min(now - busy_at, self.averager.view().quiet_seconds)
            if now >= deadline or quiet >= quiet_seconds:
                return
            await clock.sleep(0.05)

    def _may_end_without(self) -> bool:
        """Whether the block's rounds go on without this peer: other peers, or this process's blocks that stay, serve
        all blocks of a path through it, or in the synchronous setting all blocks."""
        config = self._membership.config
        paths = map(config.blocks_of, config.paths_through(self.stage.block))
        needed = [config.blocks] if config.rounds.synchronous else paths
        return any(all(map(self._goes_on, blocks)) for blocks in needed)

    def _goes_on(self, block: Block) -> bool:
        beside = self._process.blocks.get(block)
        stays = beside is not None and beside is not self and beside.presence.stays
        return stays or bool(self._membership.known.others(block))

    async def drain(self, seconds: float) -> bool:
        """Take no more microbatches, and finish those in flight, until their acknowledgements are passed on. Returns
        whether all were finished within `seconds`."""
        self.stage.admission.close()
        await self.presence.become(PeerState.LEAVING)
        await self.presence.announce()
        clock = self._membership.clock
        deadline = clock.monotonic() + seconds
        with self._membership.waits.on("what is in flight here, to leave then"):
            while clock.monotonic() < deadline and self.stage.is_busy:
                await clock.sleep(0.1)
        return not self.stage.is_busy

    async def go_on(self) -> None:
        self.stage.admission.open()
        await self.presence.become(PeerState.SERVING)
        await self.presence.announce()

    async def leave(self) -> None:
        """Write a last checkpoint if the newest one is older, unless the disk hangs, and withdraw from the DHT."""
        await self.checkpoints.last()
        await self.presence.withdraw()

    async def settle(self) -> None:
        """Wait until acknowledgements are passed on downstream: without them the peers there would roll back."""
        clock = self._membership.clock
        deadline = clock.monotonic() + SETTLE_SECONDS
        while self.stage.answers.num_settling and clock.monotonic() < deadline:
            await clock.sleep(0.02)

    # -- news ------------------------------------------------------------------------------------------------------

    def _waits_for_round(self, _: float) -> str:
        """What the peer waits for at the end of a synchronous round; empty with DiLoCo, where training goes on
        meanwhile."""
        is_held_up = self._membership.config.rounds.synchronous and self.stage.is_closed
        return f"the commit of round {self.stage.round}" if is_held_up else ""

    def _waits_for_stage(self, _: float) -> str:
        obstacles = ((block, hop.obstacle) for block, hop in self.stage.context.hops.items())
        return ", ".join(f"stage {block} ({each.causes or 'it has no peer'})" for block, each in obstacles if each)

    def _committed(self) -> None:
        self._news.committed(
            self.member.reports[-1], samples_per_second=self._process.samples_per_second(self.stage),
            is_behind=self.averager.is_behind,
        )  # fmt: skip
        self.checkpoints.committed()


def group_lead(averager: Averager) -> RoundView | PeerId:
    """The round as leases see it, if this peer leads the stage's group; otherwise the leader."""
    view = averager.view()
    if not view.is_leader:
        return view.leader_id
    return RoundView(
        round=view.round, microbatches=view.microbatches, committed=view.shown, counted=view.counted, lost=view.lost,
        highest_microbatch=view.highest_microbatch, quiet_seconds=view.quiet_seconds,
        awaits_reports=averager.awaits_reports(), misses_member=averager.misses_member(),
        complete=view.complete,
    )  # fmt: skip
