"""A stage peer's parts, wired together: weights, compute thread, hop, averager and the gRPC server over them.

Used by mover.py, which runs one after another. Nothing is announced before it is served, and nothing is served before
the stage's state is here: bind -> get the state -> announce, average, write checkpoints -> drain -> leave.
"""

import asyncio
import dataclasses
import logging
import random
import resource
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

import swarm
from peers.shared.membership import Membership
from peers.stage_peer import resume
from peers.stage_peer.checkpoints import Checkpoints
from peers.stage_peer.incarnation import Incarnation, Rivals
from peers.stage_peer.news import StageNews
from peers.stage_peer.others import find_others
from peers.stage_peer.own_backend import own_backend
from peers.stage_peer.resume import ResumeOptions
from swarm.averaging.averager import Averager
from swarm.averaging.context import Context
from swarm.averaging.servicer import AveragingServicer
from swarm.averaging.transport import GrpcTransport
from swarm.checkpoint.folder import CheckpointFolder
from swarm.checkpoint.writer import CheckpointWriter
from swarm.dht import keys
from swarm.dht.lookup import DirectoryServicer
from swarm.errors import Fatal, NotReady, PeerUnavailable
from swarm.events.kinds import Events, Join
from swarm.hop.connections import watch_connections
from swarm.hop.hop import Hop
from swarm.interchange.weights import WeightsFolder
from swarm.machine.loop_lag import LoopLag
from swarm.machine.out_of_memory import in_words
from swarm.pipeline.lease_service import GroupLead, LeaseServicer
from swarm.pipeline.leases import RoundView
from swarm.rpc import tls
from swarm.rpc.callers import Callers
from swarm.rpc.channels import SERVER_OPTIONS, ChannelPool, bind_server
from swarm.rpc.guard import Guard
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.averaging_pb2_grpc import add_AveragingServiceServicer_to_server
from swarm.rpc.v1.directory_pb2_grpc import add_DirectoryServiceServicer_to_server
from swarm.rpc.v1.lease_pb2_grpc import add_LeaseServiceServicer_to_server
from swarm.rpc.v1.stage_pb2_grpc import add_StageServiceServicer_to_server
from swarm.stage.boundary import reply_specs, request_specs
from swarm.stage.context import StageContext, StageLimits
from swarm.stage.incoming import max_kept_bytes
from swarm.stage.member import StageMember
from swarm.stage.runtime import Runtime
from swarm.stage.servicer import StageServicer
from swarm.stage.slots import LARGEST_NUM_SLOTS
from swarm.stage.stage import stage_of
from swarm.stage.staging import staging_of
from swarm.stage.state import digest_of
from swarm.training.round_member import Snapshot
from swarm.types import PROTOCOL_VERSION, PeerId, PeerRecord, PeerState

logger = logging.getLogger(__name__)

MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of getrusage's ru_maxrss."""
ANNOUNCE_SECONDS = 5.0
RECORD_SECONDS = 20.0
"""Lifetime of an announcement: a peer that died is listed for at most this long."""
SETTLE_SECONDS = 5.0
"""For how long, at most, a peer that ends waits until acknowledgements are passed on: each of them takes no longer."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What concerns this machine alone."""

    name: str
    device: torch.device
    insecure: bool
    max_in_flight: int
    graph_bytes: int | None
    """What autograd graphs may take; None for a share of what is free."""
    resume: ResumeOptions
    checkpoints: CheckpointWriter | None
    events: Events
    weights: WeightsFolder | None = None
    """What the run begins with, if it is here."""
    movable: bool = False
    """Whether the peer may be needed elsewhere and go there."""
    moves: int = 0
    """How often it has done so."""
    incarnation: Incarnation = field(default_factory=Incarnation)
    """This start of the process."""


class _Health(HealthServicer):
    """What gRPC's own tools ask. Without Watch: whoever takes none of its news would hold up all that there are."""

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Watch is not offered here; use Check")


class StageServer:
    """One stage peer, as long as it stays at its stage."""

    def __init__(
        self, membership: Membership, stage: int, tasks: asyncio.TaskGroup, options: ServerOptions
    ) -> None:  # fmt: skip
        self._config = config = membership.config
        self._number = stage
        self._identity = identity = membership.identity
        self._known = membership.known
        self._router = router = membership.known.router
        self._directory = membership.directory
        self._clock = clock = membership.clock
        self._options = options
        self._events = options.events
        self._state = PeerState.JOINING
        self._leaves = False
        self._endpoint = ""
        self._dht_address = ""
        self._held_at = 0
        """Round of the peers that hold the stage, when this one began."""
        self._channels = ChannelPool(insecure=options.insecure, identity=identity, clock=clock)
        max_in_flight = options.max_in_flight or config.stages.num_stages + 2
        limits = StageLimits(max_in_flight=max_in_flight, largest_in_flight=options.max_in_flight or LARGEST_NUM_SLOTS)
        most_in_flight = max(limits.max_in_flight, limits.largest_in_flight)
        self._callers = Callers(clock, max_training_bytes=max_kept_bytes(request_specs(config, stage), most_in_flight))
        staging = staging_of(options.device)
        self._runtime = Runtime(queue_capacity=1024, stopwatch=staging.stopwatch)
        backend = own_backend(
            config, stage, device=options.device, staging=staging, given=options.weights,
            graph_bytes=options.graph_bytes, events=self._events,
        )  # fmt: skip
        hop = None
        if not backend.is_last:
            hop = Hop(
                run_id=config.run_id, stage=stage + 1, reply_specs=reply_specs(config, stage + 1), router=router,
                channels=self._channels, clock=clock, events=self._events,
            )  # fmt: skip
        self._stage = stage_of(
            StageContext(
                config=config,
                backend=backend,
                runtime=self._runtime,
                hop=hop,
                clock=clock,
                tasks=tasks,
                limits=limits,
                events=self._events,
            ),
            is_behind=lambda: self._averager.is_behind,
        )
        self._hop = hop
        self._member = StageMember(
            self._stage, num_alive=lambda: self._averager.statistics().num_alive, on_commit=self._committed,
            events=self._events,
        )  # fmt: skip
        self._averager: Averager
        self.checkpoints = Checkpoints(
            options.checkpoints, config, stage, self._member, tasks,
            highest_microbatch=lambda: self._averager.view().highest_microbatch,
        )  # fmt: skip
        self._health = _Health()
        self._news = StageNews(clock)
        self._loop_lag = LoopLag(clock)
        self._rivals = Rivals(
            dataclasses.replace(membership, channels=self._channels), own=options.incarnation,
            endpoint=lambda: self._endpoint,
        )  # fmt: skip

    @asynccontextmanager
    async def serving(self, host: str, port: int, announced_host: str, dht_address: str) -> AsyncIterator[str]:
        """Have the stage's state and serve it inside the block; gives the endpoint that others are told.

        Raises:
            ValueError: the port is in use, or the stage would begin anew beside a folder's checkpoints.
            Fatal, PeerUnavailable: as of resume.choose.
            ExceptionGroup: of a NotReady: the stage's state could not be had of those who hold it.
        """
        guard = Guard(
            authority=self._identity.authority, callers=self._callers, clock=self._clock, stage=lambda: self._number
        )
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[guard])
        credentials = None if self._options.insecure else tls.server_credentials(self._identity)
        announced = f"[{announced_host}]" if ":" in announced_host else announced_host
        self._endpoint = f"{announced}:{bind_server(server, host, port, credentials)}"
        self._dht_address = dht_address
        if self._options.graph_bytes is None:
            limit_bytes = self._stage.context.backend.budget.limit_bytes
            logger.info("up to %s of %s for autograd graphs", in_words(limit_bytes), self._options.device)
        self._runtime.start()
        try:
            await self._begin()
            context = Context(
                config=self._config,
                own=self._record(),
                peers=self._known.peers,
                transport=GrpcTransport(self._channels),
                clock=self._clock,
                events=self._events,
            )
            self._averager = Averager(context, self._member)
            self._add_services(server)
            await server.start()
            async with asyncio.TaskGroup() as tasks:
                averaging = tasks.create_task(self._averager.run())
                reporting = tasks.create_task(self._stage.endings.report_changes(self._averager.notify))
                await asyncio.sleep(0)
                await self._averager.join()
                if not self._options.resume.moves:
                    await self._have_state()
                self._require_state()
                self._stage.admission.open()
                self._state = PeerState.SERVING
                self._events.write(Join())
                works = self._keep_announced(), self._watch_connections(), self._loop_lag.run()
                background = [tasks.create_task(work) for work in works]
                await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
                yield self._endpoint
                for task in (averaging, reporting, *background):
                    task.cancel()
        finally:
            self._stage.end()
            await server.stop(grace=1.0)
            await self._settle()
            await self._channels.close()
            self._runtime.stop(timeout_seconds=2.0)

    async def _settle(self) -> None:
        """Let what was acknowledged to this peer be acknowledged to those behind it, or they would roll it back."""
        deadline = self._clock.monotonic() + SETTLE_SECONDS
        while self._stage.answers.num_settling and self._clock.monotonic() < deadline:
            await self._clock.sleep(0.02)

    async def _watch_connections(self) -> None:
        """The peers of the next stage, if there is one."""
        if self._hop is not None:
            await watch_connections(
                stage=self._hop.stage, router=self._router, channels=self._channels, clock=self._clock
            )  # fmt: skip

    def _add_services(self, server: grpc.aio.Server) -> None:
        stage_servicer = StageServicer(
            self._stage, describe=self._describe, callers=self._callers, rival_of=self._rivals.of
        )  # fmt: skip
        lease_servicer = LeaseServicer(
            config=self._config, stage=self._number, clock=self._clock, rng=random.SystemRandom(), lead=self._lead,
            changed=self._averager.changed, events=self._events,
        )  # fmt: skip
        averaging_servicer = AveragingServicer(self._averager.handlers, own_id=self._identity.peer_id)
        directory_servicer = DirectoryServicer(
            store=self._directory.store, keys=keys.of_run(self._config.run_id, self._config.stages.num_stages),
            clock=self._clock,
        )  # fmt: skip
        add_StageServiceServicer_to_server(stage_servicer, server)
        add_LeaseServiceServicer_to_server(lease_servicer, server)
        add_AveragingServiceServicer_to_server(averaging_servicer, server)
        add_DirectoryServiceServicer_to_server(directory_servicer, server)
        add_HealthServicer_to_server(self._health, server)

    @property
    def round(self) -> int:
        """The round that it is at."""
        return self._stage.round

    @property
    def lineage(self) -> str:
        """Of the state with which that began."""
        return self._member.progress().lineage

    @property
    def last_members(self) -> Collection[str]:
        """Ids of those who took part in the round before; empty where this peer does not know them."""
        return self._averager.last_members

    @property
    def samples_per_second(self) -> float:
        """What this peer manages here; 0 before the first microbatch."""
        return self._stage.samples_per_second

    @property
    def fault(self) -> Fatal | None:
        """Why this peer cannot go on, if it cannot."""
        return self._stage.admission.fault

    async def gives_up(self) -> None:
        """Return once this peer cannot go on."""
        await self._stage.admission.gives_up()

    def will_leave(self) -> None:
        """Say that this peer leaves to whoever asks, though it serves on: others are not to leave because of it."""
        self._leaves = True

    async def end_of_round(self, seconds: float, *, quiet_seconds: float) -> None:
        """Serve until the present round is closed, and wait for its commit; to be followed by `drain`.

        Returns sooner after so many seconds, where no other peer would take this one's samples or there are none, where
        another stage is empty, or once nothing has been under way here for `quiet_seconds`, with all members there:
        nobody trains.
        """
        number = self._stage.round
        busy_at, deadline = self._clock.monotonic(), self._clock.monotonic() + seconds
        while (
            self._stage.round == number
            and (self._member.progress().num_samples > 0 or self._stage.is_busy)
            and all(self._known.others(stage) for stage in range(self._config.stages.num_stages))
        ):
            closed = self._stage.is_closed
            # What comes between the close and the commit is the next round's, and would go with this peer.
            if closed:
                self._stage.admission.close()
            else:
                self._stage.admission.open()
            now = self._clock.monotonic()
            if closed or self._stage.is_busy or self._averager.misses_member():
                # A round that waits for a silent member is quiet, and goes on all the same.
                busy_at = now
            quiet = min(now - busy_at, self._averager.view().quiet_seconds)
            if now >= deadline or quiet >= quiet_seconds:
                return
            await self._clock.sleep(0.05)

    async def drain(self, seconds: float) -> bool:
        """Take no more microbatches, and finish those in flight: up to the acknowledgement, and until it is passed on.

        Returns:
            Whether that was done in so many seconds.
        """
        self._stage.admission.close()
        self._state = PeerState.LEAVING
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._announce()
        deadline = self._clock.monotonic() + seconds
        while self._clock.monotonic() < deadline and self._stage.is_busy:
            await self._clock.sleep(0.1)
        return not self._stage.is_busy

    async def go_on(self) -> None:
        """Serve again after a drain."""
        self._stage.admission.open()
        self._state = PeerState.SERVING
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._announce()

    async def leave(self) -> None:
        """Be gone for the others, once drained or not; with what a checkpoint lacks written, unless the disk hangs."""
        await self.checkpoints.last()
        try:
            await self._directory.withdraw()
        except PeerUnavailable as error:
            logger.debug("not withdrawn: %s", error)

    # -- the state --------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Take the state of a checkpoint, if there is one and nobody holds this stage."""
        config, stage, options = self._config, self._number, self._options.resume
        resumes = options.folder is not None and not CheckpointFolder(options.folder, config).is_empty
        others = await find_others(
            config, stage, known=self._known, directory=self._directory, channels=self._channels, clock=self._clock,
            patient=options.joins and resumes, gives_up=options.moves,
        )  # fmt: skip
        # Only now: a peer that was waited for may have written its last state here.
        folder = CheckpointFolder(options.folder, config) if options.folder is not None else None
        self._held_at = others.held_at or 0
        shapes = {name: master.shape for name, master in self._stage.context.backend.weights.masters.items()}
        beginning = await asyncio.to_thread(resume.choose, config, stage, shapes, others, folder, options)
        if beginning is None:
            # Its stage may have had ids granted, in this very round, that nobody is left to tell of.
            await self._member.begin(highest_microbatch=0 if others.has_begun else -1)
            return
        restored = beginning.restored
        tensors = restored.tensors if restored is not None else (await self._member.snapshot()).tensors
        snapshot = Snapshot(
            round=beginning.round, run_samples=beginning.run_samples, lineage=beginning.lineage, tensors=tensors,
            digest=await asyncio.to_thread(digest_of, tensors),
        )  # fmt: skip
        source = "initial" if restored is None else "checkpoint"
        await self._member.begin_with(
            snapshot, beginning.highest_microbatch, source=source, parent=beginning.parent
        )  # fmt: skip
        if restored is not None:
            logger.info("resumes at round %d, from %s", beginning.round, ", ".join(map(str, restored.files)))
            resume.say_changes(
                restored.config, config, round_number=beginning.round, run_samples=beginning.run_samples
            )  # fmt: skip
            if self._options.checkpoints is not None:
                self._options.checkpoints.went_back(config, beginning.round, stage=stage if others.rounds else None)

    async def _have_state(self) -> None:
        """Wait while others hold what could not be downloaded at once: averaging goes on asking them."""
        while self._lacks_state and self._known.others(self._number):
            await self._clock.sleep(0.5)

    @property
    def _lacks_state(self) -> bool:
        """Whether it has nothing but initial weights, in a run that has gone on."""
        return self._stage.round == 0 < self._held_at

    def _require_state(self) -> None:
        # How far the holders said that they were does not matter: one of them may have made that up.
        if self._lacks_state:
            raise NotReady(
                f"the state of stage {self._number} could not be downloaded: start this peer again, with --resume DIR "
                "if nobody else holds the stage"
            )

    def _committed(self) -> None:
        self._news.committed(
            self._member.reports[-1], samples_per_second=self._stage.samples_per_second,
            is_behind=self._averager.is_behind,
        )  # fmt: skip
        self.checkpoints.committed()

    # -- what others are told ----------------------------------------------------------------------------------------

    async def _keep_announced(self) -> None:
        announced_round = self._stage.round
        while True:
            await self._announce()
            self._news.look(self._stage.counters["forwards"] + self._stage.counters["backwards"])
            for _ in range(int(ANNOUNCE_SECONDS / 0.5)):
                await self._clock.sleep(0.5)
                if self._stage.round != announced_round:
                    announced_round = self._stage.round
                    break

    def _record(self) -> PeerRecord:
        return PeerRecord(
            peer_id=self._identity.peer_id, name=self._options.name, software_version=swarm.__version__,
            announced_at=self._clock.time(), stage=self._number, endpoint=self._endpoint,
            certificate_pem="" if self._options.insecure else self._identity.certificate_pem, state=self._state,
            samples_per_second=self._stage.samples_per_second, queue_length=self._runtime.queue_length,
            round=self._stage.round, samples=self._member.run_samples, lineage=self._member.progress().lineage,
            dht_address=self._dht_address, device=str(self._options.device), movable=self._options.movable,
            moves=self._options.moves, nonce=self._options.incarnation.nonce,
            started_at=self._options.incarnation.started_at,
        )  # fmt: skip

    async def _announce(self) -> None:
        try:
            await self._directory.announce_peer(self._record(), RECORD_SECONDS)
        except PeerUnavailable as error:
            logger.warning("not announced: %s", error)

    def _lead(self) -> GroupLead:
        view = self._averager.view()
        if not view.is_leader:
            return GroupLead(leader_id=PeerId(view.leader_id), view=None)
        round_view = RoundView(
            round=view.round, committed=view.shown, counted=view.counted, lost=view.lost,
            highest_microbatch=view.highest_microbatch, quiet_seconds=view.quiet_seconds,
            awaits_reports=self._averager.awaits_reports(), misses_member=self._averager.misses_member(),
            complete=view.complete,
        )  # fmt: skip
        return GroupLead(leader_id=PeerId(view.leader_id), view=round_view)

    def _describe(self) -> pb.DescribeReply:
        progress = self._member.progress()
        averaging = self._averager.statistics()
        device = self._options.device
        return pb.DescribeReply(
            peer_id=self._identity.peer_id, name=self._options.name, protocol_version=PROTOCOL_VERSION,
            software_version=swarm.__version__, run_id=self._config.run_id, stage=self._number,
            state=PeerState.LEAVING if self._leaves else self._state,
            round=progress.round, run_samples=progress.run_samples, round_samples=progress.num_samples,
            lineage=progress.lineage, samples_per_second=self._stage.samples_per_second,
            queue_length=self._runtime.queue_length,
            counters=pb.StageCounters(
                **self._stage.counters.by_name(), recomputed_forwards=self._stage.context.backend.budget.num_recomputed
            ),
            averaging=pb.AveragingCounters(
                attempts=averaging.num_attempts, aborted=averaging.aborted, downloads=averaging.num_downloads,
                refusals=averaging.refusals,
            ),
            rounds=list(self._member.reports), loop_lag_seconds=self._loop_lag.seconds,
            resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES,
            device_bytes=_most_device_bytes(device),
        )  # fmt: skip


def _most_device_bytes(device: torch.device) -> int:
    """The most that has been in use of a GPU; of MPS, which does not note it, what is in use."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(torch.mps.driver_allocated_memory()) if device.type == "mps" else 0
