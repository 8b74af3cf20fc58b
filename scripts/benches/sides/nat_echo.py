"""For the bench `nat`: a meeting point, a peer that waits there or is reached directly, and a caller.

nat_echo meet HOST              prints the meeting point's entry
nat_echo serve HOST [ENTRY]     prints a record, as JSON: of a tunnel through ENTRY, or of HOST's own port
nat_echo call RECORD SECONDS    sends pieces of 1 MiB, and prints how many bytes arrived a second, and by which way
"""

import asyncio
import json
import time
from typing import Any

import grpc

from swarm.credentials.identity import generate
from swarm.machine.clock import SystemClock, run_loop
from swarm.rpc import tls
from swarm.rpc.channels import ChannelPool
from swarm.rpc.endpoint import endpoint_of
from swarm.rpc.entry import Entry
from swarm.rpc.meeting.carrying import Kind, MeetingLimits
from swarm.rpc.meeting.dialler import Points
from swarm.rpc.meeting.meeting_point import MeetingPoint
from swarm.rpc.meeting.waiting import Waiting
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1.meeting_pb2_grpc import add_MeetingServiceServicer_to_server
from swarm.types import PeerRecord, PeerState

PIECE = bytes(1 << 20)
SETTLE_SECONDS = 4.0  # Time before the line is measured. If there is a better way, it is found in this time.
CLOCK = SystemClock()


async def meet(host: str) -> None:
    own = generate()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    point = MeetingPoint(own.peer_id, MeetingLimits(), CLOCK, insecure=False, is_exchanging=lambda: False)
    add_MeetingServiceServicer_to_server(point, server)
    port = bind_server(server, host, 0, tls.server_credentials(own))
    await server.start()
    print(Entry.at(own.peer_id, host, port), flush=True)
    await server.wait_for_termination()


async def serve(host: str, entry: str = "") -> None:
    own, points = generate(), [Entry.parse(entry)] if entry else []

    async def take(request: bytes, _: Any) -> bytes:
        punched = waiting.num_lines(Kind.PUNCHED)
        return json.dumps("direct" if not entry else "punched" if punched else "relayed").encode()

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers: Any = {"Take": grpc.unary_unary_rpc_method_handler(take)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("nat", handlers),))
    port = bind_server(server, "" if entry else host, 0, tls.server_credentials(own))
    await server.start()
    waiting = Waiting(own, Points(own, insecure=False), CLOCK, server=("127.0.0.1", port), candidates=lambda: points)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(waiting.run())
        while points and not waiting.endpoints:
            await CLOCK.sleep(0.05)
        endpoints = waiting.endpoints or (endpoint_of(host, port),)
        record = PeerRecord(
            peer_id=own.peer_id, announced_at=CLOCK.time(), stage=0, endpoint=endpoints[0],
            certificate_pem=own.certificate_pem, state=PeerState.SERVING,
        )  # fmt: skip
        print(record.model_dump_json(), flush=True)


async def call(record: str, seconds: str) -> None:
    peer, pool, num_bytes, way = PeerRecord.model_validate_json(record), ChannelPool(), 0, ""

    async def send(until: float) -> None:
        nonlocal num_bytes, way
        while time.monotonic() < until:
            stub: Any = pool.channel(peer).unary_unary("/nat/Take")
            way = json.loads(await stub(PIECE, timeout=30.0, wait_for_ready=True))
            num_bytes += len(PIECE)

    await send(time.monotonic() + SETTLE_SECONDS)
    num_bytes, began_at = 0, time.monotonic()
    until = began_at + float(seconds)
    await asyncio.gather(send(until), send(until))
    print(json.dumps({"bytes_per_second": num_bytes / (time.monotonic() - began_at), "way": way}), flush=True)
    await pool.close()


def main(role: str, *arguments: str) -> None:
    roles: dict[str, Any] = {"meet": meet, "serve": serve, "call": call}
    run_loop(roles[role](*arguments))
