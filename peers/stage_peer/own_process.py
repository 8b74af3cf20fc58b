"""What the blocks of one process share: how others reach it, its meeting point, and what it says of itself as a whole.

It knows which blocks the process serves now, so that each of them finds the others.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from peers.reach.listen import Announced
from peers.shared.network import AMENDMENTS_SECONDS, Membership
from peers.stage_peer.incarnation import Rivals
from peers.stage_peer.own_stage import ServerOptions
from swarm.config import RunConfig
from swarm.content.service import ContentServicer, Shelves
from swarm.dht import keys
from swarm.dht.directory import Announcement
from swarm.dht.lookup import DirectoryServicer
from swarm.machine.clock import Clock
from swarm.rpc.callers import Callers
from swarm.rpc.entry import direct
from swarm.rpc.meeting.carrying import MeetingLimits
from swarm.rpc.meeting.meeting_point import MeetingPoint
from swarm.rpc.probe import ProbeServicer
from swarm.rpc.transfers import Turns
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.content_pb2_grpc import add_ContentServiceServicer_to_server
from swarm.rpc.v1.directory_pb2_grpc import add_DirectoryServiceServicer_to_server
from swarm.rpc.v1.meeting_pb2_grpc import add_MeetingServiceServicer_to_server
from swarm.rpc.v1.probe_pb2_grpc import add_ProbeServiceServicer_to_server
from swarm.stage.boundary import boundary_of
from swarm.stage.stage import Stage
from swarm.types import AmendmentsRecord, Block, PeerState

if TYPE_CHECKING:
    from peers.stage_peer.served_block import ServedBlock

KEPT_SECONDS = 60.0
"""A lag is remembered for at least this long, and at most twice as long."""
_GAP_SECONDS = 0.02
"""Time between two measurements. A lag may be longer than its measurement by up to this time."""


def carried(config: RunConfig, bytes_per_second: float, round_trip_seconds: float) -> float:
    """The samples per second that a line to the next stage carries. Infinity if nothing was measured yet, and if
    microbatches are so small that the line's length decides how long they take, and not its width."""
    data = config.data
    num_bytes = boundary_of(config).spec(data.microbatch_size, data.sequence_length).num_bytes
    if not bytes_per_second or num_bytes < 2 * round_trip_seconds * bytes_per_second:
        return math.inf
    return data.microbatch_size * bytes_per_second / num_bytes


class LoopLag:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._largest = self._largest_before = 0.0
        """The largest lag of the present period, and of the one before it."""

    @property
    def seconds(self) -> float:
        """The longest lag within the last KEPT_SECONDS, or up to twice that."""
        return max(self._largest, self._largest_before)

    async def run(self) -> None:
        began_at = self._clock.monotonic()
        while True:
            due_at = self._clock.monotonic() + _GAP_SECONDS
            await self._clock.sleep(_GAP_SECONDS)
            now = self._clock.monotonic()
            if now >= began_at + KEPT_SECONDS:
                began_at, self._largest_before, self._largest = now, self._largest, 0.0
            self._largest = max(self._largest, now - due_at)


class Health(HealthServicer):
    """gRPC's health service, without Watch: with Watch, a caller that does not read its updates would block all
    others."""

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Watch is not offered here; use Check")


class OwnProcess:
    """One process while it serves blocks.

    Attributes:
        blocks: the blocks that it serves now.
        num_moves: how often it has moved to other blocks since it started.
        callers: counts what is kept for each caller, at all blocks together.
    """

    def __init__(self, membership: Membership, options: ServerOptions, callers: Callers) -> None:
        self.blocks: dict[Block, ServedBlock] = {}
        self.num_moves = 0
        self.callers = callers
        self._config, self._membership = membership.config, membership
        self._router = membership.known.router
        self._directory, self._clock, self._peer_id = membership.directory, membership.clock, membership.peer_id
        self.health = Health()
        self.loop_lag = LoopLag(membership.clock)
        self.rivals = Rivals(membership, own=options.incarnation, endpoint=lambda: self.endpoint)
        self._announced: Callable[[], Announced] = Announced
        self.meeting_point = MeetingPoint(
            membership.identity.peer_id, MeetingLimits.of(options.given.relay_mbit), membership.clock,
            insecure=membership.channels.is_insecure, is_exchanging=self.is_exchanging, run_id=membership.config.run_id,
        )  # fmt: skip
        membership.channels.points.serve_here(self.meeting_point.line_to)

    def listens(self, announced: Callable[[], Announced]) -> None:
        self._announced = announced

    def add_services(self, server: grpc.aio.Server, shelves: Shelves, turns: Turns) -> None:
        """Serve what belongs to no block."""
        config, clock = self._config, self._clock
        directory = DirectoryServicer(
            store=self._membership.directory.store,
            keys=keys.of_run(config.run_id, config.blocks),
            clock=clock,
            dht_addresses=lambda: self.announced.dht_addresses,
        )
        content = ContentServicer(config.run_id, shelves, is_exchanging=self.is_exchanging, clock=clock, turns=turns)
        add_DirectoryServiceServicer_to_server(directory, server)
        add_ContentServiceServicer_to_server(content, server)
        add_MeetingServiceServicer_to_server(self.meeting_point, server)
        add_ProbeServiceServicer_to_server(ProbeServicer(is_exchanging=self.is_exchanging, clock=clock), server)
        add_HealthServicer_to_server(self.health, server)

    @property
    def announced(self) -> Announced:
        return self._announced()

    @property
    def endpoint(self) -> str:
        """The best endpoint of this process; empty while it does not listen."""
        return self.announced.endpoints[0]

    async def tell_health(self) -> None:
        """Tell gRPC's health service whether some block serves."""
        statuses = health_pb2.HealthCheckResponse
        serves = any(block.presence.state is PeerState.SERVING for block in self.blocks.values())
        await self.health.set("", statuses.SERVING if serves else statuses.NOT_SERVING)

    def described(self) -> dict[Block, pb.DescribeReply]:
        """What the blocks say of themselves."""
        return {name: block.describe() for name, block in self.blocks.items()}

    async def follow_amendments(self) -> None:
        """Take in the amendments that are in the DHT, and keep in the DHT what this process knows, until cancelled. An
        open run has none."""
        if not self._config.owner:
            return
        announcing = Announcement(
            self._directory, "the run's amendments", self._amendments, self._clock,
            occasion=lambda: self._membership.timeline.texts, every_seconds=AMENDMENTS_SECONDS,
        )  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(announcing.keep())
            await self._membership.follow_amendments()

    def _amendments(self) -> AmendmentsRecord | None:
        texts, now = self._membership.timeline.texts, self._clock.time()
        return AmendmentsRecord(peer_id=self._peer_id, announced_at=now, amendments=texts) if texts else None

    def is_exchanging(self) -> bool:
        """Whether the average of some block is under way, to which other traffic on this process's line gives way."""
        return any(block.averager.is_exchanging for block in self.blocks.values())

    def is_busy(self) -> bool:
        return any(block.stage.is_busy for block in self.blocks.values())

    def samples_per_second(self, stage: Stage) -> float:
        """What a stage manages beside the others that its compute thread serves; 0 before its first microbatch. The
        thread is taken to get as many samples of each of those paths of which most blocks are here."""
        runtime, paths_through = stage.context.runtime, self._config.paths_through
        beside = (block.stage for block in self.blocks.values() if block.stage.context.runtime is runtime)
        paths = {one: paths_through(one.block) for one in {stage, *beside}}
        here = Counter(path for through in paths.values() for path in through)
        samples = {one: max(1, sum(here[p] == max(here.values()) for p in through)) for one, through in paths.items()}
        seconds = sum(number * one.seconds_per_sample for one, number in samples.items())
        return samples[stage] / seconds if stage.seconds_per_sample else 0.0

    def line_samples_per_second(self, stage: Stage) -> float:
        """What the line from a stage to the next one carries (`carried`); infinity if the next one is here."""
        hops = {block: hop for block, hop in stage.context.hops.items() if block not in self.blocks}
        bytes_per_second = sum(hop.line_bytes_per_second for hop in hops.values())
        trips = [link.round_trip_seconds or 0.0 for block in hops for link in self._router.links(block).values()]
        return carried(stage.context.config_in(stage.round), bytes_per_second, min(trips, default=0.0))

    def lines(self) -> pb.Lines:
        announced, point = self.announced, self.meeting_point
        return pb.Lines(
            punched=announced.num_punched, relayed=announced.num_relayed, waiting=point.num_waiting,
            carried=point.budget.num_connections, carried_bytes=point.budget.num_bytes,
            is_hidden=not direct(announced.endpoints),
        )  # fmt: skip
