"""Adds each service of a stage peer to its gRPC server. Used by server.py, which makes the servicers."""

import grpc
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from peers.stage_peer.presence import Health
from swarm.averaging.averager import Averager
from swarm.averaging.servicer import AveragingServicer
from swarm.content.servicer import ContentServicer
from swarm.dht.lookup import DirectoryServicer
from swarm.pipeline.lease_service import GroupLead, LeaseServicer
from swarm.pipeline.leases import RoundView
from swarm.rpc.meeting.meeting_point import MeetingPoint
from swarm.rpc.probe import ProbeServicer
from swarm.rpc.v1.averaging_pb2_grpc import add_AveragingServiceServicer_to_server
from swarm.rpc.v1.content_pb2_grpc import add_ContentServiceServicer_to_server
from swarm.rpc.v1.directory_pb2_grpc import add_DirectoryServiceServicer_to_server
from swarm.rpc.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from swarm.rpc.v1.lease_pb2_grpc import add_LeaseServiceServicer_to_server
from swarm.rpc.v1.meeting_pb2_grpc import add_MeetingServiceServicer_to_server
from swarm.rpc.v1.probe_pb2_grpc import add_ProbeServiceServicer_to_server
from swarm.rpc.v1.stage_pb2_grpc import add_StageServiceServicer_to_server
from swarm.stage.generation import GenerationServicer
from swarm.stage.servicer import StageServicer
from swarm.types import PeerId


def add_services(
    server: grpc.aio.Server, *, stage: StageServicer, generation: GenerationServicer, lease: LeaseServicer,
    averaging: AveragingServicer, directory: DirectoryServicer, content: ContentServicer, meeting: MeetingPoint,
    probe: ProbeServicer, health: Health,
) -> None:  # fmt: skip
    """Add these servicers to a server, before it starts."""
    add_StageServiceServicer_to_server(stage, server)
    add_GenerationServiceServicer_to_server(generation, server)
    add_LeaseServiceServicer_to_server(lease, server)
    add_AveragingServiceServicer_to_server(averaging, server)
    add_DirectoryServiceServicer_to_server(directory, server)
    add_ContentServiceServicer_to_server(content, server)
    add_MeetingServiceServicer_to_server(meeting, server)
    add_ProbeServiceServicer_to_server(probe, server)
    add_HealthServicer_to_server(health, server)


def group_lead(averager: Averager) -> GroupLead:
    """The leader of the stage's group; if that is this peer, with the leases' view of the round."""
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
