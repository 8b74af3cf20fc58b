"""A peer that only answers Describe, with the replies that a test chooses: a gRPC server without TLS."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceServicer, add_StageServiceServicer_to_server
from swarm.types import PeerRecord, PeerState

Say = Callable[[pb.DescribeRequest], pb.DescribeReply]
"""Returns the peer's reply. An error that it raises ends the call."""


class _Servicer(StageServiceServicer):
    Train: Any = None
    Evaluate: Any = None
    Hold: Any = None
    Show: Any = None
    SpotCheck: Any = None

    def __init__(self, say: Say) -> None:
        self._say = say

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        return self._say(request)


@asynccontextmanager
async def describing(stage: int, say: Say) -> AsyncIterator[PeerRecord]:
    """Serve inside the block. Yields the peer's record."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_StageServiceServicer_to_server(_Servicer(say), server)
    endpoint = f"127.0.0.1:{bind_server(server, '127.0.0.1', 0, None)}"
    await server.start()
    try:
        yield PeerRecord(
            peer_id=f"{stage:040x}", name=f"peer of stage {stage}", announced_at=0.0, stage=stage, endpoint=endpoint,
            certificate_pem="", state=PeerState.SERVING,
        )  # fmt: skip
    finally:
        await server.stop(None)
