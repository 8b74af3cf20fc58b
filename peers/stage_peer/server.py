"""A stage peer's parts, wired together: weights, compute thread, hop, averager and the gRPC server over them.

A stage is served only once its state is here, and announced only once it is served: bind -> get the state -> announce,
average, write checkpoints -> drain -> leave.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc

from peers.reach.listen import Announced, Listening
from peers.shared.network import Membership
from peers.stage_peer.news import StageNews
from peers.stage_peer.own_stage import ServerOptions, own_backend, warm_up
from peers.stage_peer.own_state import Checkpoints, OwnState
from peers.stage_peer.presence import Presence
from peers.stage_peer.resume import require_weights
from peers.stage_peer.services import Services
from peers.status.peer_row import PeerRow
from swarm.averaging.averager import Averager
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import Transport
from swarm.events import Join
from swarm.hop.hop import Hop, watch_connections
from swarm.hop.retries import HopLimits
from swarm.machine.out_of_memory import in_words
from swarm.rpc import tls
from swarm.rpc.callers import Callers
from swarm.rpc.channels import ChannelPool
from swarm.rpc.guard import Guard
from swarm.rpc.serving import SERVER_OPTIONS, bind_server, start_server
from swarm.rpc.transfers import Turns
from swarm.stage.boundary import reply_specs, request_specs
from swarm.stage.call import max_kept_bytes
from swarm.stage.context import StageContext, StageLimits
from swarm.stage.member import StageMember
from swarm.stage.runtime import Runtime
from swarm.stage.slots import LARGEST_NUM_SLOTS
from swarm.stage.stage import Stage
from swarm.stage.staging import staging_of
from swarm.stage.time_shares import TimeWatch

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
"""How long a peer that ends waits at most until it has passed on its acknowledgements. Passing on one takes no longer
than this."""


class StageServer:
    def __init__(self, membership: Membership, stage: int, tasks: asyncio.TaskGroup, options: ServerOptions) -> None:
        config, clock = membership.config, membership.clock
        # The channels are closed with this server, because at another stage the peer has other neighbours.
        channels = ChannelPool(
            insecure=options.insecure, identity=membership.identity, clock=clock, points=membership.channels.points
        )
        self._membership = membership = dataclasses.replace(membership, channels=channels)
        self._options = options
        max_in_flight = options.max_in_flight or config.stages.num_stages + 2
        limits = StageLimits(max_in_flight=max_in_flight, largest_in_flight=options.max_in_flight or LARGEST_NUM_SLOTS)
        most_in_flight = max(limits.max_in_flight, limits.largest_in_flight)
        self.callers = Callers(clock, max_training_bytes=max_kept_bytes(request_specs(config, stage), most_in_flight))
        staging = staging_of(options.device)
        self._runtime = Runtime(queue_capacity=1024, stopwatch=staging.stopwatch)
        if config.lora.is_on:
            # The state that is downloaded from peers of the stage does not include frozen base weights.
            require_weights(config, stage, options.resume)
        backend = own_backend(config, stage, options, staging)
        hop = None
        if not backend.is_last:
            hop = Hop(
                run_id=config.run_id, stage=stage + 1, reply_specs=reply_specs(config, stage + 1),
                router=membership.known.router, channels=channels, clock=clock, events=options.events,
                limits=HopLimits(round_microbatches=config.round_microbatches), memory=staging.host_bytes,
            )  # fmt: skip
        self.stage = Stage(
            StageContext(
                config=config, backend=backend, runtime=self._runtime, hop=hop, clock=clock, tasks=tasks, limits=limits
            )
        )
        self.member = StageMember(self.stage, num_alive=lambda: self.averager.num_alive, on_commit=self._committed)
        self.averager: Averager
        self.checkpoints = Checkpoints(
            options.checkpoints, config, stage, self.member, tasks,
            highest_microbatch=lambda: self.averager.view().highest_microbatch,
        )  # fmt: skip
        self._own_state = OwnState(membership, self.stage, self.member, options)
        self._news = StageNews(clock)
        times = TimeWatch(self.stage, clock)
        self.presence = Presence(membership, self.stage, self.member, options, self.callers, times)

    @asynccontextmanager
    async def serving(self, listen: Listening) -> AsyncIterator[Announced]:
        """Get the stage's state, and serve the stage inside the block. Yields the addresses that others are told.

        Raises ValueError if the port is in use, what OwnState.begin does, and in a group NotReady if the stage's state
        could not be downloaded from the peers that hold it.
        """
        if self._options.graph_bytes is None:
            limit_bytes = self.stage.context.backend.budget.limit_bytes
            logger.info("autograd graphs may take up to %s of %s", in_words(limit_bytes), self._options.device)
        self._runtime.start()
        try:
            with self._membership.waits.on(f"the first computation of stage {self.stage.number}"):
                await warm_up(
                    self.stage.context.backend, self._runtime, self._membership.clock, device=self._options.device,
                    compiles=self._options.compiles,
                )  # fmt: skip
            await self._own_state.begin()
            waits = self._membership.waits
            async with self._server(listen) as services, asyncio.TaskGroup() as tasks:
                averaging = tasks.create_task(self.averager.run())
                reporting = tasks.create_task(self.stage.endings.report_changes(self.averager.notify))
                await asyncio.sleep(0)
                await self._own_state.arrive(self.averager)
                await self.averager.arrived()
                self.stage.admission.open()
                await self.presence.serves()
                self._options.events.write(Join())
                works = (*self.presence.works(self._news), self._watch_connections())
                background = [tasks.create_task(work) for work in works]
                self._options.own_figures.follow(
                    lambda: PeerRow.of(self.presence.record(), services.describe()),
                    run=self._membership.config.run_id,
                    stage=str(self.stage.number),
                )
                with waits.on(self._waits_for_round), waits.on(self._waits_for_stage):
                    yield self.presence.announced
                for task in (averaging, reporting, *background):
                    task.cancel()
        finally:
            self.stage.end()
            await self._settle()
            await self._membership.channels.close()
            self._runtime.stop(timeout_seconds=2.0)

    @asynccontextmanager
    async def _server(self, listen: Listening) -> AsyncIterator[Services]:
        """Have this peer's port inside the block, and serve there. Makes the averager, which is served too."""
        identity, clock = self._membership.identity, self._membership.clock
        guard = Guard(authority=identity.authority, callers=self.callers, clock=clock, stage=lambda: self.stage.number)
        credentials = None if self._options.insecure else tls.server_credentials(identity)
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[guard])
        async with listen.held():
            self.presence.listens(partial(listen.announced, bind_server(server, listen.host, listen.port, credentials)))
            turns = Turns(clock, is_training=lambda: self.stage.is_busy)
            self.averager = Averager(self._context(turns), self.member)
            services = Services(
                self._membership, self.stage, self.averager, self.presence, self._options, callers=self.callers,
                turns=turns,
            )  # fmt: skip
            services.add_to(server)
            try:
                await start_server(server)
                yield services
            finally:
                self._options.own_figures.follow(lambda: None)
                self.stage.end()
                await server.stop(grace=1.0)

    def _context(self, turns: Turns) -> Context:
        member = self._membership
        return Context(
            config=member.config, own=self.presence.record(), endpoints=lambda: self.presence.announced.endpoints,
            peers=member.known.peers, transport=Transport(member.channels), clock=member.clock,
            events=self._options.events, waits=member.waits, turns=turns,
        )  # fmt: skip

    async def _settle(self) -> None:
        """Wait until acknowledgements are passed on downstream: without them the peers there would roll back."""
        clock = self._membership.clock
        deadline = clock.monotonic() + SETTLE_SECONDS
        while self.stage.answers.num_settling and clock.monotonic() < deadline:
            await clock.sleep(0.02)

    async def _watch_connections(self) -> None:
        member, next_stage = self._membership, self.stage.number + 1
        if next_stage in member.stages:
            await watch_connections(
                stage=next_stage, router=member.known.router, channels=member.channels, clock=member.clock
            )

    async def end_of_round(self, seconds: float, *, quiet_seconds: float) -> None:
        """Serve until the present round is closed, and wait for its commit. Call `drain` next.

        Returns sooner if `seconds` have passed, if this peer has no samples in the round, if no other peer serves some
        stage, this one included, or if nothing has been under way here for `quiet_seconds` while all members are there:
        then no trainer trains.
        """
        with self._membership.waits.on(f"the end of round {self.stage.round}, to leave after it"):
            await self._end_of_round(seconds, quiet_seconds)

    async def _end_of_round(self, seconds: float, quiet_seconds: float) -> None:
        number, clock = self.stage.round, self._membership.clock
        busy_at, deadline = clock.monotonic(), clock.monotonic() + seconds
        while (
            self.stage.round == number
            and (self.member.progress().num_samples > 0 or self.stage.is_busy)
            and all(self._membership.known.others(stage) for stage in self._membership.stages)
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

    async def drain(self, seconds: float) -> bool:
        """Take no more microbatches, and finish those in flight, until their acknowledgements are passed on. Returns
        whether all were finished within `seconds`."""
        self.stage.admission.close()
        await self.presence.leaves()
        await self.presence.announce()
        clock = self._membership.clock
        deadline = clock.monotonic() + seconds
        with self._membership.waits.on("what is in flight here, to leave then"):
            while clock.monotonic() < deadline and self.stage.is_busy:
                await clock.sleep(0.1)
        return not self.stage.is_busy

    async def go_on(self) -> None:
        self.stage.admission.open()
        await self.presence.serves()
        await self.presence.announce()

    async def leave(self) -> None:
        """Write a last checkpoint if the newest one is older, unless the disk hangs, and withdraw from the DHT."""
        await self.checkpoints.last()
        await self.presence.withdraw()

    def _waits_for_round(self, _: float) -> str:
        """What the peer waits for at the end of a synchronous round; empty with DiLoCo, where training goes on
        meanwhile."""
        is_held_up = self._membership.config.rounds.synchronous and self.stage.is_closed
        return f"the commit of round {self.stage.round}" if is_held_up else ""

    def _waits_for_stage(self, _: float) -> str:
        hop = self.stage.context.hop
        obstacle = None if hop is None else hop.obstacle
        return "" if hop is None or obstacle is None else f"stage {hop.stage} ({obstacle.causes or 'it has no peer'})"

    def _committed(self) -> None:
        self._news.committed(
            self.member.reports[-1], samples_per_second=self.stage.samples_per_second, is_behind=self.averager.is_behind
        )
        self.checkpoints.committed()
