"""What a stage peer says about itself: in its record in the DHT, and in its answer to Describe."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

import swarm
from peers.reach.listen import Announced
from peers.shared import devices
from peers.shared.network import Membership
from peers.stage_peer.news import Around, StageNews
from peers.stage_peer.own_stage import ServerOptions
from swarm.averaging.averager import Averager
from swarm.dht.directory import Announcement
from swarm.errors import PeerUnavailable
from swarm.machine.clock import Clock
from swarm.rpc.callers import Callers
from swarm.rpc.entry import direct
from swarm.rpc.meeting.meeting_point import MeetingPoint
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.stage.member import StageMember
from swarm.stage.stage import Stage
from swarm.stage.time_shares import TimeWatch
from swarm.types import LONGEST_WAIT, MOST_DHT_ADDRESSES, PROTOCOL_VERSION, PeerRecord, PeerState, TrainerRecord

logger = logging.getLogger(__name__)

KEPT_SECONDS = 60.0
"""A lag is remembered for at least this long, and at most twice as long."""
_GAP_SECONDS = 0.02
"""Time between two measurements. A lag may be longer than its measurement by up to this time."""


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


MOST_LINKS = 16
LOOK_SECONDS = 5.0
"""Time between two looks at what others say about this peer."""


class Health(HealthServicer):
    """gRPC's health service, without Watch: with Watch, a caller that does not read its updates would block all
    others."""

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Watch is not offered here; use Check")


class Presence:
    """What one peer says of itself while it stays at its stage."""

    def __init__(
        self, membership: Membership, stage: Stage, member: StageMember, options: ServerOptions, callers: Callers,
        times: TimeWatch,
    ) -> None:  # fmt: skip
        self.state = PeerState.JOINING
        self.health = Health()
        self.loop_lag = LoopLag(membership.clock)
        self._times = times
        self._membership = membership
        self._stage = stage
        self._member = member
        self._options = options
        self._announced: Callable[[], Announced] = Announced
        self._callers = callers
        self._trainers: Sequence[TrainerRecord] = ()
        """As last read from the DHT."""
        self._will_leave = False
        self._announcement = Announcement(
            membership.directory, "this peer", self.record, membership.clock, occasion=lambda: self._occasion,
            level=logging.WARNING,
        )  # fmt: skip

    def listens(self, announced: Callable[[], Announced]) -> None:
        self._announced = announced

    @property
    def announced(self) -> Announced:
        return self._announced()

    @property
    def endpoint(self) -> str:
        """The best endpoint of this peer; empty while it does not listen."""
        return self.announced.endpoints[0]

    async def serves(self) -> None:
        self.state = PeerState.SERVING
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def leaves(self) -> None:
        self.state = PeerState.LEAVING
        await self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)

    def will_leave(self) -> None:
        """From now on say in answers to Describe that this peer leaves, so that no other peer relies on it. It still
        serves."""
        self._will_leave = True

    # -- in the DHT --------------------------------------------------------------------------------------------------

    def record(self) -> PeerRecord:
        identity, options, stage, announced = self._membership.identity, self._options, self._stage, self.announced
        return PeerRecord(
            peer_id=identity.peer_id,
            name=options.name,
            software_version=swarm.__version__,
            announced_at=self._membership.clock.time(),
            stage=stage.number,
            endpoint=announced.endpoints[0],
            other_endpoints=announced.endpoints[1:],
            certificate_pem="" if options.insecure else identity.certificate_pem,
            state=self.state,
            samples_per_second=stage.samples_per_second,
            queue_length=stage.context.runtime.queue_length,
            round=stage.round,
            samples=self._member.run_samples,
            lineage=self._member.progress().lineage,
            dht_address=next(iter(announced.dht_addresses), ""),
            other_dht_addresses=announced.dht_addresses[1:MOST_DHT_ADDRESSES],
            device=str(options.device),
            movable=options.movable,
            moves=options.moves,
            nonce=options.incarnation.nonce,
            started_at=options.incarnation.started_at,
            bans=self._membership.known.bans(stage.number + 1, self._membership.clock),
        )

    async def announce(self) -> None:
        await self._announcement.now()

    def works(self, news: StageNews) -> Sequence[Coroutine[Any, Any, None]]:
        return self.keep_announced(), self._look_around(news), self.loop_lag.run(), self._times.run()

    async def keep_announced(self) -> None:
        """Announce the record at intervals; at once after a commit, with new endpoints, and when the DHT is back."""
        unheard = "a node of the DHT that takes this peer's record, without which others do not find it"
        with self._membership.waits.on(lambda _: unheard if self._announcement.is_refused else ""):
            await self._announcement.keep()

    async def _look_around(self, news: StageNews) -> None:
        while True:
            await self._membership.clock.sleep(LOOK_SECONDS)
            around = await self._around()
            news.look(self._stage.counters["forwards"] + self._stage.counters["backwards"], around)
            news.look_at(self._time_shares(), around)

    async def _around(self) -> Around:
        number, member = self._stage.number, self._membership
        known, now = member.known, member.clock.time()
        with contextlib.suppress(PeerUnavailable):
            self._trainers = await member.directory.trainers(partly=True)
        senders = self._trainers if number == 0 else known.peers(number - 1)
        return Around(
            endpoint=self.endpoint,
            num_calls=self._callers.num_begun,
            num_others=len(known.others(number)) + len(self._trainers),
            has_trainer=bool(self._trainers),
            empty_stages=[stage for stage in member.stages if stage != number and not known.others(stage)],
            left_alone_by={
                sender.name or sender.peer_id[:8]: ban.reason
                for sender in senders
                for ban in sender.bans
                if ban.peer_id == member.peer_id and ban.until > now
            },
        )

    @property
    def _occasion(self) -> tuple[int, int, Sequence[str]]:
        return self._stage.round, self._membership.directory.num_returns, self.announced.endpoints

    async def withdraw(self) -> None:
        try:
            await self._membership.directory.withdraw()
        except PeerUnavailable as error:
            logger.debug("not withdrawn: %s", error)

    # -- to those who ask --------------------------------------------------------------------------------------------

    def describe(
        self, averager: Averager, generation: pb.GenerationCounters | None = None, point: MeetingPoint | None = None
    ) -> pb.DescribeReply:  # fmt: skip
        stage, progress, averaging = self._stage, self._member.progress(), averager.counters()
        averaging.exchanged_bytes = self._member.exchanged_bytes
        return pb.DescribeReply(
            peer_id=self._membership.peer_id,
            name=self._options.name,
            protocol_version=PROTOCOL_VERSION,
            software_version=swarm.__version__,
            run_id=self._membership.config.run_id,
            stage=stage.number,
            state=PeerState.LEAVING if self._will_leave else self.state,
            round=progress.round,
            run_samples=progress.run_samples,
            round_samples=progress.num_samples,
            lineage=progress.lineage,
            samples_per_second=stage.samples_per_second,
            queue_length=stage.context.runtime.queue_length,
            counters=pb.StageCounters(
                **stage.counters, recomputed_forwards=stage.context.backend.budget.num_recomputed
            ),
            averaging=averaging,
            generation=generation,
            lines=None if point is None else self._lines(point),
            waiting_for=self._membership.waits.present[:LONGEST_WAIT],
            links=self._links(),
            last_peers=self._last_peers(),
            rounds=list(self._member.reports),
            loop_lag_seconds=self.loop_lag.seconds,
            time_shares=self._time_shares(),
            resident_bytes=devices.most_resident_bytes(),
            device_bytes=devices.most_device_bytes(self._options.device),
        )

    def _lines(self, point: MeetingPoint) -> pb.Lines:
        announced = self.announced
        return pb.Lines(
            punched=announced.num_punched, relayed=announced.num_relayed, waiting=point.num_waiting,
            carried=point.budget.num_connections, carried_bytes=point.budget.num_bytes,
            is_hidden=not direct(announced.endpoints),
        )  # fmt: skip

    def _time_shares(self) -> pb.TimeShares:
        shares, peak = self._times.shares, self._options.peak_flops
        return pb.TimeShares(
            **dataclasses.asdict(shares), utilisation=shares.flops_per_second / peak if peak else 0.0,
        )  # fmt: skip

    def _last_peers(self) -> list[pb.LastPeer]:
        member, clock = self._membership, self._membership.clock
        gone = {stage: member.known.router.gone(stage) for stage in member.stages if stage != self._stage.number}
        offset = clock.time() - clock.monotonic()
        return [
            pb.LastPeer(stage=stage, name=last.name, last_at=offset + last.last_at, has_left=last.has_left)
            for stage, last in gone.items()
            if last is not None
        ]

    def _links(self) -> list[pb.Link]:
        links = self._membership.known.router.links(self._stage.number + 1)
        measured = [(peer_id, link) for peer_id, link in links.items() if link.bytes_per_second is not None]
        return [
            pb.Link(
                peer_id=peer_id, round_trip_seconds=link.round_trip_seconds or 0.0,
                bytes_per_second=link.bytes_per_second or 0.0,
            )
            for peer_id, link in measured[:MOST_LINKS]
        ]  # fmt: skip
