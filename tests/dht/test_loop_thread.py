"""A thread with an event loop of its own, and what it leaves behind."""

import asyncio
import gc
import socket
from pathlib import Path

from swarm.dht.loop_thread import LoopThread


def test_connections_that_cancelled_work_leaves_open_are_closed_with_the_thread(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")

    async def connect() -> asyncio.StreamWriter:
        _, writer = await asyncio.open_unix_connection(path)
        return writer

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        thread = LoopThread("test")
        writer = thread.run(connect())
        thread.close()
    assert writer.is_closing()
    del writer
    gc.collect()  # A connection that is still open would be reported here, and fail this test.
