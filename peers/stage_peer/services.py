"""The services on a stage peer's gRPC server: those of each block, and those of the process."""

import random
from typing import Any

import grpc
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from peers.shared.network import Membership
from peers.stage_peer.own_process import OwnProcess
from peers.stage_peer.own_stage import ServerOptions
from swarm.averaging.averager import Averager
from swarm.averaging.servicer import AveragingServicer
from swarm.content.service import ContentServicer, Shelves
from swarm.dht import keys
from swarm.dht.lookup import DirectoryServicer
from swarm.pipeline.lease_service import LeaseServicer
from swarm.pipeline.leases import RoundView
from swarm.rpc.dispatch import BlockHandlers
from swarm.rpc.probe import ProbeServicer
from swarm.rpc.transfers import Turns
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


def block_handlers(
    membership: Membership, stage: Stage, averager: Averager, servicer: StageServicer, generation: GenerationServicer,
    options: ServerOptions,
) -> BlockHandlers:  # fmt: skip
    config, handlers = membership.config, BlockHandlers(options.prefix)
    lease = LeaseServicer(
        config=config, block=stage.block, clock=membership.clock, rng=random.SystemRandom(),
        lead=lambda: group_lead(averager), changed=averager.changed, events=options.events,
    )  # fmt: skip
    server: Any = handlers
    add_stage_servicer(servicer, server)
    add_GenerationServiceServicer_to_server(generation, server)
    add_LeaseServiceServicer_to_server(lease, server)
    add_AveragingServiceServicer_to_server(AveragingServicer(averager.handlers), server)
    return handlers


def add_services_of(
    process: OwnProcess, membership: Membership, shelves: Shelves, turns: Turns, server: grpc.aio.Server
) -> None:
    """Add what belongs to no block."""
    config, clock = membership.config, membership.clock
    directory = DirectoryServicer(
        store=membership.directory.store,
        keys=keys.of_run(config.run_id, config.blocks),
        clock=clock,
        dht_addresses=lambda: process.announced.dht_addresses,
    )
    content = ContentServicer(config.run_id, shelves, is_exchanging=process.is_exchanging, clock=clock, turns=turns)
    add_DirectoryServiceServicer_to_server(directory, server)
    add_ContentServiceServicer_to_server(content, server)
    add_MeetingServiceServicer_to_server(process.meeting_point, server)
    add_ProbeServiceServicer_to_server(ProbeServicer(is_exchanging=process.is_exchanging, clock=clock), server)
    add_HealthServicer_to_server(process.health, server)


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
