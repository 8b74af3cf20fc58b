"""A run of one peer that shows its announcement over gRPC, answers probes, dials back, and serves nothing else."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from swarm import config as configs
from swarm.config import RunConfig
from swarm.credentials.identity import Identity
from swarm.dht import keys
from swarm.dht.directory import Directory
from swarm.dht.lookup import DirectoryServicer
from swarm.machine.clock import Clock, SystemClock
from swarm.rpc import tls
from swarm.rpc.entry import Entry
from swarm.rpc.meeting.carrying import MeetingLimits
from swarm.rpc.meeting.meeting_point import MeetingPoint
from swarm.rpc.probe import ProbeServicer
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1.directory_pb2_grpc import add_DirectoryServiceServicer_to_server
from swarm.rpc.v1.meeting_pb2_grpc import add_MeetingServiceServicer_to_server
from swarm.rpc.v1.probe_pb2_grpc import add_ProbeServiceServicer_to_server
from swarm.types import PROTOCOLS, PeerId, PeerRecord, PeerState, Protocols, RunRecord
from tests.support.memory_store import MemoryStore


@dataclass(frozen=True)
class ShownRun:
    """The announced record, and the endpoint that shows it."""

    config: RunConfig
    entry: Entry
    server: grpc.aio.Server


@asynccontextmanager
async def shown_run(
    config: RunConfig, own: Identity, dht_address: str, *, port: int = 0, clock: Clock | None = None,
    protocols: Protocols = PROTOCOLS, insecure: bool = False,
) -> AsyncIterator[ShownRun]:  # fmt: skip
    """A run with one peer. It says that the DHT is entered at `dht_address`, and what time its clock shows."""
    shown_clock, clock = clock or SystemClock(), SystemClock()
    dht = MemoryStore(clock)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    run_keys = keys.of_run(config.run_id, config.blocks)
    add_DirectoryServiceServicer_to_server(DirectoryServicer(store=dht, keys=run_keys, clock=clock), server)
    add_ProbeServiceServicer_to_server(ProbeServicer(is_exchanging=lambda: False, clock=shown_clock), server)
    dialling_back = MeetingPoint(
        PeerId(own.peer_id), MeetingLimits(), clock, insecure=insecure, is_exchanging=lambda: False
    )
    add_MeetingServiceServicer_to_server(dialling_back, server)
    credentials = None if insecure else tls.server_credentials(own)
    endpoint = f"127.0.0.1:{bind_server(server, '127.0.0.1', port, credentials)}"
    await server.start()
    directory = Directory(dht, own, config.run_id, clock)
    await directory.announce(RunRecord(peer_id=own.peer_id, config_json=configs.to_json(config)), 100.0)
    record = PeerRecord(
        peer_id=own.peer_id, name="first", announced_at=clock.time(), stage=0, endpoint=endpoint,
        certificate_pem="" if insecure else own.certificate_pem, state=PeerState.SERVING, dht_address=dht_address,
        protocol_version=protocols.newest, oldest_protocol=protocols.oldest,
    )  # fmt: skip
    await directory.announce(record, 100.0)
    try:
        yield ShownRun(config, Entry(PeerId(own.peer_id), endpoint), server)
    finally:
        await server.stop(None)
