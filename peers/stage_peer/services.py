"""The services of a stage peer on its gRPC server."""

import random

import grpc
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from peers.shared.network import Membership
from peers.stage_peer.incarnation import Rivals
from peers.stage_peer.own_stage import ServerOptions
from peers.stage_peer.presence import Presence
from swarm.averaging.averager import Averager
from swarm.averaging.servicer import AveragingServicer
from swarm.content.servicer import ContentServicer
from swarm.dht import keys
from swarm.dht.lookup import DirectoryServicer
from swarm.pipeline.lease_service import GroupLead, LeaseServicer
from swarm.pipeline.leases import RoundView
from swarm.rpc.callers import Callers
from swarm.rpc.meeting.meeting_point import MeetingPoint
from swarm.rpc.probe import ProbeServicer
from swarm.rpc.transfers import Turns
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.averaging_pb2_grpc import add_AveragingServiceServicer_to_server
from swarm.rpc.v1.content_pb2_grpc import add_ContentServiceServicer_to_server
from swarm.rpc.v1.directory_pb2_grpc import add_DirectoryServiceServicer_to_server
from swarm.rpc.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from swarm.rpc.v1.lease_pb2_grpc import add_LeaseServiceServicer_to_server
from swarm.rpc.v1.meeting_pb2_grpc import add_MeetingServiceServicer_to_server
from swarm.rpc.v1.probe_pb2_grpc import add_ProbeServiceServicer_to_server
from swarm.rpc.wire import add_stage_servicer
from swarm.stage.generation import GenerationServicer
from swarm.stage.servicer import StageServicer
from swarm.stage.stage import Stage
from swarm.types import PeerId


class Services:
    def __init__(
        self, membership: Membership, stage: Stage, averager: Averager, presence: Presence, options: ServerOptions, *,
        callers: Callers, turns: Turns,
    ) -> None:  # fmt: skip
        self._membership = membership
        self._stage = stage
        self._averager = averager
        self._presence = presence
        self._options = options
        self._callers = callers
        self._turns = turns
        self._generation = GenerationServicer(stage, options.sessions)
        self._meeting_point = MeetingPoint(
            membership.identity.peer_id, options.meeting, membership.clock, insecure=options.insecure,
            is_exchanging=self._is_exchanging, run_id=membership.config.run_id,
        )  # fmt: skip
        membership.channels.points.serve_here(self._meeting_point.line_to)

    def add_to(self, server: grpc.aio.Server) -> None:
        config, clock = self._membership.config, self._membership.clock
        averager, options = self._averager, self._options
        rivals = Rivals(self._membership, own=options.incarnation, endpoint=lambda: self._presence.endpoint)
        stage = StageServicer(self._stage, describe=self.describe, callers=self._callers, rival_of=rivals.of)
        lease = LeaseServicer(
            config=config, stage=self._stage.number, clock=clock, rng=random.SystemRandom(),
            lead=lambda: group_lead(averager), changed=averager.changed, events=options.events,
        )  # fmt: skip
        directory = DirectoryServicer(
            store=self._membership.directory.store,
            keys=keys.of_run(config.run_id, config.stages.num_stages),
            clock=clock,
            dht_addresses=lambda: self._presence.announced.dht_addresses,
        )
        content = ContentServicer(
            config.run_id, options.shelves, is_exchanging=self._is_exchanging, clock=clock, turns=self._turns
        )
        averaging = AveragingServicer(averager.handlers, own_id=self._membership.peer_id)
        add_stage_servicer(stage, server)
        add_GenerationServiceServicer_to_server(self._generation, server)
        add_LeaseServiceServicer_to_server(lease, server)
        add_AveragingServiceServicer_to_server(averaging, server)
        add_DirectoryServiceServicer_to_server(directory, server)
        add_ContentServiceServicer_to_server(content, server)
        add_MeetingServiceServicer_to_server(self._meeting_point, server)
        add_ProbeServiceServicer_to_server(ProbeServicer(is_exchanging=self._is_exchanging, clock=clock), server)
        add_HealthServicer_to_server(self._presence.health, server)

    def describe(self) -> pb.DescribeReply:
        return self._presence.describe(self._averager, self._generation.counters(), self._meeting_point)

    def _is_exchanging(self) -> bool:
        return self._averager.is_exchanging


def group_lead(averager: Averager) -> GroupLead:
    """The leader of the stage's group. If this peer leads, the answer also has the round as leases see it."""
    view = averager.view()
    if not view.is_leader:
        return GroupLead(leader_id=PeerId(view.leader_id), view=None)
    round_view = RoundView(
        round=view.round, committed=view.shown, counted=view.counted, lost=view.lost,
        highest_microbatch=view.highest_microbatch, quiet_seconds=view.quiet_seconds,
        awaits_reports=averager.awaits_reports(), misses_member=averager.misses_member(),
        complete=view.complete,
    )  # fmt: skip
    return GroupLead(leader_id=PeerId(view.leader_id), view=round_view)
