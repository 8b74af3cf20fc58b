"""The proxy that opens gRPC's connections ends all of them when it ends."""

import asyncio
from contextlib import suppress

import pytest

from swarm.errors import PeerUnavailable
from swarm.rpc.meeting.carrying import Line
from swarm.rpc.meeting.dialler import Dialler
from tests.support.chain import PATIENCE_SECONDS


async def _no_line() -> Line:
    raise PeerUnavailable("no way")


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_connection_that_came_just_before_the_end_is_closed(num_turns: int) -> None:
    dialler = Dialler()
    _, options = dialler.route(_no_line)
    port = int(str(dict(options)["grpc.http_proxy"]).rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await dialler.close()
    async with asyncio.timeout(PATIENCE_SECONDS):
        with suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()
