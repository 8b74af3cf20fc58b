"""A server begins and ends whatever is cancelled meanwhile."""

import asyncio

import grpc
import pytest

from swarm.rpc.serving import SERVER_OPTIONS, bind_server, start_server


async def test_a_server_whose_start_was_cancelled_can_be_stopped() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    port = bind_server(server, "127.0.0.1", 0, None)
    starting = asyncio.create_task(start_server(server))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await server.stop(None)
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.1", port)
