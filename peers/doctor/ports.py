"""Checks this machine's two ports: whether they are free, and whether others reach them from outside.

Other peers dial both ports back. Meanwhile both answer as a peer's would: on one a gRPC server with this process's
certificate, on the other a listener that sends only the first line of a DHT node's protocol.
"""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from peers.doctor.finding import Finding, fine, not_checked, wrong
from peers.reach.inquiry import Inquiry, Verdict
from peers.reach.listen import Outside, PortOptions, loopback_advice
from peers.reach.own_port import answering, answering_as_node, reserved
from swarm.credentials.identity import Identity
from swarm.dht import addresses
from swarm.machine.clock import Clock
from swarm.machine.words import counted
from swarm.rpc.channels import ChannelPool
from swarm.rpc.endpoint import LOOPBACK, endpoint_of
from swarm.rpc.entry import direct
from swarm.rpc.meeting.check import MAX_ENDPOINTS
from swarm.rpc.serving import Front
from swarm.rpc.v1 import meeting_pb2 as pb
from swarm.types import PeerRecord

GRPC, DHT = "gRPC port", "DHT port"


def _taken(options: PortOptions) -> list[Finding]:
    found = []
    for what, option, port in ((GRPC, "--port", options.port), (DHT, "--dht-port", options.dht_port)):
        try:
            _free(options.host, port)
        except ValueError as error:
            found.append(wrong(what, f"{option} {port} cannot be had: {error}; choose another port"))
    return found


def _free(host: str, port: int) -> int:
    """The port, or for 0 a free one. Raises ValueError if it is not free."""
    for one in addresses.hosts(host):
        port = addresses.free_port(one, port)
    return port


def unasked(options: PortOptions) -> list[Finding]:
    taken = _taken(options)
    known = {finding.what for finding in taken}
    why = "whether others reach it is for the peers of a run to say"
    return [*taken, *(not_checked(what, why) for what in (GRPC, DHT) if what not in known)]


async def from_outside(
    options: PortOptions, peers: Sequence[PeerRecord], channels: ChannelPool, own: Identity, clock: Clock
) -> list[Finding]:
    """Ask peers to dial both ports back, and return the findings. After a cancellation nothing listens any more."""
    if _taken(options) or not peers:
        return unasked(options)
    port, dht_port = _free(options.host, options.port), _free(options.host, options.dht_port)
    request = pb.CheckRequest(
        peer_id=own.peer_id,
        endpoints=_named(options.outside, port),
        dht_endpoints=_named(options.outside_dht, dht_port),
        run_id=channels.points.run_id,
    )
    inquiry = Inquiry(channels, clock, random.Random(own.peer_id))
    async with _answering(options, port, dht_port, own, insecure=channels.is_insecure):
        verdict = await inquiry.verdict([peer for peer in peers if direct(peer.endpoints)], request)
    if verdict is None:
        why = inquiry.hindrance or "no peer that is reached directly dials it back"
        return [not_checked(what, why) for what in (GRPC, DHT)]
    return judge(port, dht_port, verdict, host=options.host)


@asynccontextmanager
async def _answering(
    options: PortOptions, port: int, dht_port: int, own: Identity, *, insecure: bool
) -> AsyncIterator[None]:
    if not options.shares_port:
        async with answering(options.host, port, own, insecure=insecure), answering_as_node(options.host, dht_port):
            yield
        return
    with reserved(LOOPBACK) as of_grpc, reserved(LOOPBACK) as of_dht:
        inner, inner_dht = (sock.getsockname()[1] for sock in (of_grpc, of_dht))
        async with (
            answering(LOOPBACK, inner, own, insecure=insecure),
            answering_as_node(LOOPBACK, inner_dht),
            Front(inner, inner_dht).listening(options.host, port),
        ):
            yield


def judge(port: int, dht_port: int, verdict: Verdict, *, host: str = "") -> list[Finding]:
    """The findings about how others will reach this machine, by what peers reached that dialled back. `host` is what
    --host says."""
    asked = counted(verdict.num_asked, "peer")
    end, dht_end = (next(iter(ends), "") for ends in (verdict.endpoints, verdict.dht_endpoints))
    detour = "will reach it by way of further peers. " + (
        loopback_advice(host).capitalize()
        or "To be reached directly: --port and --dht-port fix both, and a firewall or router has to let them in"
    )
    of_grpc = f"{asked} got no answer at {port}: others {detour}"
    if verdict.num_reached:
        few = f"{verdict.num_reached} of {asked}; the others {detour}" if verdict.is_hidden else asked
        of_grpc = f"{end or port} is reached from outside, by {few}"
    of_dht = f"no answer at {dht_port}: this machine will ask the DHT, and not be asked"
    return [fine(GRPC, of_grpc), fine(DHT, f"{dht_end} is reached from outside" if dht_end else of_dht)]


def _named(outside: Sequence[Outside], port: int) -> list[str]:
    """The endpoints to dial: those that --announce names, and `:PORT` for the address from which the caller is seen."""
    named = [endpoint_of(one.host, one.port or port) for one in outside]
    return [*named, f":{port}"][:MAX_ENDPOINTS]
