"""Punching where the meeting point means harm: what is dialled, and what is sent there."""

import asyncio
from typing import Any

import grpc
import pytest

from swarm.credentials.identity import generate
from swarm.rpc import tls
from swarm.rpc.endpoint import may_be_dialled
from swarm.rpc.entry import Entry
from swarm.rpc.meeting.dialler import Dialler, Points
from swarm.rpc.meeting.punch import GREETING, candidates, punch
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1 import meeting_pb2 as pb
from swarm.rpc.v1.meeting_pb2_grpc import MeetingServiceServicer, add_MeetingServiceServicer_to_server

COMMAND = b"FLUSHALL\r\n".ljust(32)


class Liar(MeetingServiceServicer):
    """A meeting point that gives a service of the peer's machine out for the other peer."""

    def __init__(self, victim: str) -> None:
        self._victim = victim

    async def Meet(self, request: pb.MeetRequest, context: Any) -> None:  # type: ignore[override]
        await context.write(pb.MeetReply(observed=self._victim, secret=COMMAND))
        await asyncio.Event().wait()


@pytest.mark.parametrize("request_", [pb.MeetRequest(to="a" * 40), pb.MeetRequest(token="b")])
async def test_a_meeting_point_cannot_choose_what_is_sent_to_a_service_that_it_names(request_: pb.MeetRequest) -> None:
    heard = asyncio.Queue[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # It says something by itself, as many services do.
        writer.write(b"+OK ready, and here are more bytes than a peer would read at first\r\n")
        heard.put_nowait(await reader.read(1 << 16))
        writer.close()

    own, server = generate(), grpc.aio.server(options=SERVER_OPTIONS)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as victim:
        liar = Liar(f"127.0.0.1:{victim.sockets[0].getsockname()[1]}")  # type: ignore[abstract]
        add_MeetingServiceServicer_to_server(liar, server)
        port = bind_server(server, "127.0.0.1", 0, tls.server_credentials(own))
        await server.start()
        dialler = Dialler()
        point = Entry(own.peer_id, f"127.0.0.1:{port}")
        punching = asyncio.create_task(punch(Points(None, insecure=False), dialler, point, request_))
        said = await heard.get()
        punching.cancel()
        await asyncio.gather(punching, return_exceptions=True)
        assert COMMAND not in said
        # A peer that was called says nothing before the caller does.
        assert said[: len(GREETING)] == (GREETING if request_.to else b"")
        await dialler.close()
        await server.stop(None)


@pytest.mark.parametrize(
    ("host", "named_by", "may_be"),
    [
        ("198.51.100.7", "192.0.2.1", True), ("192.168.1.7", "192.0.2.1", True), ("192.0.2.1", "192.0.2.1", True),
        ("127.0.0.1", "192.0.2.1", False), ("127.77.1.2", "192.0.2.1", False), ("169.254.169.254", "192.0.2.1", False),
        ("0.0.0.0", "192.0.2.1", False), ("::1", "2001:db8::1", False), ("::ffff:127.0.0.1", "192.0.2.1", False),
        ("::ffff:169.254.169.254", "2001:db8::1", False), ("fe80::1%eth0", "2001:db8::1", False),
        ("224.0.0.1", "192.0.2.1", False), ("localhost", "192.0.2.1", False), ("127.0.0.1", "127.0.0.1", True),
    ],
)  # fmt: skip
def test_what_is_within_this_machine_is_not_dialled_on_the_word_of_another(
    host: str, named_by: str, may_be: bool
) -> None:
    assert may_be_dialled(host, named_by) == may_be
    end = f"[{host}]:7" if ":" in host else f"{host}:7"
    for reply in (pb.MeetReply(observed=end), pb.MeetReply(local=end)):
        assert candidates(reply, named_by) == ([(host, 7)] if may_be else [])
