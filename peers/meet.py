"""swarm-meet: what people who are all behind routers need of one machine that is reached from outside.

    swarm-meet --port 443

It is the first address of any number of runs, a node of their DHT, and a meeting point through which their peers reach
each other. It holds no model, trains nothing, and sees only ciphertext of what it carries. All of that takes one TCP
port, and no torch.
"""

import dataclasses
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import grpc
import tyro

from peers.reach.listen import Outside, own_outside, private_advice
from peers.shared import cli, logs, stopping
from peers.shared import option_types as takes
from peers.shared.process import cache_folder
from peers.shared.sole_writer import claim_identity
from peers.shared.token_option import VARIABLE, read_token
from swarm.credentials.authority import Owners
from swarm.credentials.identity import Identity
from swarm.dht import node as dht_node
from swarm.dht.lookup import DirectoryServicer
from swarm.dht.node import DhtNode
from swarm.machine.clock import SystemClock, run_loop
from swarm.rpc import tls
from swarm.rpc.callers import Callers
from swarm.rpc.endpoint import LOOPBACK
from swarm.rpc.entry import Entry
from swarm.rpc.guard import Guard
from swarm.rpc.meeting.carrying import MeetingLimits
from swarm.rpc.meeting.meeting_point import MeetingPoint
from swarm.rpc.probe import ProbeServicer
from swarm.rpc.serving import SERVER_OPTIONS, Front, bind_server, start_server
from swarm.rpc.v1.directory_pb2_grpc import add_DirectoryServiceServicer_to_server
from swarm.rpc.v1.meeting_pb2_grpc import add_MeetingServiceServicer_to_server
from swarm.rpc.v1.probe_pb2_grpc import add_ProbeServiceServicer_to_server

logger = logging.getLogger(__name__)

PROG = "swarm-meet"
BYTES_PER_MBIT = 125_000.0
LIMITS = MeetingLimits(max_waiting=1024, max_connections=2048)
"""More than at a peer, which has other work: this machine serves several runs."""


@dataclass(frozen=True, kw_only=True)
class MeetOptions:
    """Be the first address and the meeting point of runs whose peers are behind routers, and train nothing."""

    port: Annotated[int, takes.whole(1, 65535)] = 443
    """The one TCP port, which has to be reached from outside. Port 443 leaves almost every network."""
    host: str = ""
    """IP address to listen on; left out, all of this machine's, of IPv4 and IPv6."""
    announce: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """HOST[:PORT] at which others reach this machine, once for each such address, the best first. Left out, the
    machine's own addresses are announced."""
    token: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Serve only locked runs: those of the owner of this token, or @FILE, once for each owner. Any token of the owner
    will do, and SWARM_TOKEN too. Left out, the runs of everybody are served."""
    relay_mbit: Annotated[int, takes.whole(1, 10**6)] = 200
    """Megabits per second that are carried at most for peers that reach each other in no other way."""
    identity: takes.File | None = None
    """File with this program's key, made if missing; by default in ~/.cache/swarm. With the same file and address,
    invites stay valid."""
    log_level: logs.LogLevel = "info"

    def __post_init__(self) -> None:
        for outside in self.outside:
            outside.require_heard(self.host, option="--announce")

    @property
    def outside(self) -> tuple[Outside, ...]:
        return tuple(Outside.parse(text, option="--announce") for text in self.announce)


def main(argv: Sequence[str]) -> int:
    options = cli.parse(MeetOptions, prog=PROG, argv=argv)
    logs.setup_logging(PROG, options.log_level)
    takes.require_own_host("--host", options.host)
    takes.require_free_port("--port", options.host, options.port)
    claimed = claim_identity(options.identity, cache_folder() / "identities", "meet")
    own = dataclasses.replace(claimed.identity, authority=owners_of(options.token or _in_environment()))
    outside = [
        Outside(one.host, one.port or options.port)
        for one in options.outside or own_outside(options.host, (), is_named=False)
    ]
    node = dht_node.start(
        clock=SystemClock(), host=LOOPBACK, announce=[(one.host, one.port) for one in outside],
        identity_path=claimed.libp2p_path,
    )  # fmt: skip
    try:
        node.belong_to(None, own.authority)
        run_loop(serve(options, own, node, outside))
    finally:
        node.shutdown()
    return 0


def _in_environment() -> tuple[str, ...]:
    return (os.environ[VARIABLE],) if os.environ.get(VARIABLE) else ()


def owners_of(tokens: Sequence[str]) -> Owners | None:
    """The owners of these tokens; None if there are none. Raises ValueError or OSError for what is no token."""
    certificates = dict.fromkeys(read_token(text).authority.certificate_pem for text in tokens)
    return Owners("".join(certificates)) if certificates else None


async def serve(options: MeetOptions, own: Identity, node: DhtNode, outside: Sequence[Outside]) -> None:
    """Serve until told to stop. Raises ValueError if nothing can listen on the port."""
    clock = SystemClock()
    guard = Guard(authority=own.authority, callers=Callers(clock), clock=clock, stage=lambda: -1)
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[guard])
    limits = dataclasses.replace(LIMITS, bytes_per_second=options.relay_mbit * BYTES_PER_MBIT)
    point = MeetingPoint(own.peer_id, limits, clock, insecure=False, is_exchanging=lambda: False)
    directory = DirectoryServicer(store=node, keys=None, clock=clock, dht_addresses=node.addresses)
    add_MeetingServiceServicer_to_server(point, server)
    add_DirectoryServiceServicer_to_server(directory, server)
    add_ProbeServiceServicer_to_server(ProbeServicer(is_exchanging=lambda: False, clock=clock), server)
    front = Front(bind_server(server, LOOPBACK, 0, tls.server_credentials(own)), node.port)
    stop = stopping.stop_event()
    try:
        await start_server(server)
        async with front.listening(options.host, options.port):
            _say(own, outside)
            await stop.wait()
    finally:
        await server.stop(grace=1.0)


def _say(own: Identity, outside: Sequence[Outside]) -> None:
    whose = "of these tokens' owners" if own.authority is not None else "of whoever reaches it"
    entries = [Entry.at(own.peer_id, one.host, one.port) for one in outside]
    print(f"Meeting point at {', '.join(entry.endpoint for entry in entries)}, for the runs {whose}")
    print(f"  begin a run:  swarm-peer --meet {entries[0]} --preset tiny")
    print("  Others join with the INVITE that this peer prints.", flush=True)
    if advice := private_advice([entry.endpoint for entry in entries]):
        logger.warning("%s", advice)
