"""The caller's side of a call with many messages."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from swarm.errors import PeerUnavailable
from swarm.rpc.stream import Stream


async def test_a_call_that_breaks_while_its_end_is_written_is_a_failed_peer() -> None:
    """gRPC's core may notice the break first, and then raises another error, which would end this process."""

    async def taken(*_: Any) -> None:
        return None

    async def broken() -> None:
        raise grpc.aio.InternalError("Failed execute_batch")

    with pytest.raises(PeerUnavailable, match="not finished"):
        await Stream(SimpleNamespace(write=taken, done_writing=broken, code=taken)).finish(b"", 5.0)
