"""One peer is asked what it says of itself: every way in which that fails is one of the library's errors."""

import asyncio
import math
from collections.abc import Callable

import pytest

from swarm.errors import DeadlineExceeded, MalformedMessage, PeerUnavailable, SwarmError, WrongRun
from swarm.rpc.channels import ChannelPool
from swarm.rpc.describe import describe
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PeerRecord, PeerState
from tests.support.describing import describing

REQUEST = pb.DescribeRequest(run_id="run")


def _refuse(request: pb.DescribeRequest) -> pb.DescribeReply:
    raise RuntimeError("a bug")


async def test_it_answers() -> None:
    async with describing(0, lambda request: pb.DescribeReply(run_id=request.run_id, round=7)) as record:
        assert (await describe(ChannelPool(insecure=True).channel(record), REQUEST, seconds=5.0)).round == 7


@pytest.mark.parametrize(
    ("say", "error"),
    [
        (lambda _: pb.DescribeReply(run_id="another"), WrongRun),
        (lambda _: pb.DescribeReply(run_id="run", samples_per_second=math.inf), MalformedMessage),
        (_refuse, PeerUnavailable),
    ],
)
async def test_an_answer_that_is_of_no_use_is_an_error(
    say: Callable[[pb.DescribeRequest], pb.DescribeReply], error: type[SwarmError]
) -> None:
    async with describing(0, say) as record:
        with pytest.raises(error):
            await describe(ChannelPool(insecure=True).channel(record), REQUEST, seconds=5.0)


async def test_a_peer_that_says_nothing_is_late() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        record = PeerRecord(
            peer_id="a" * 40, announced_at=0.0, stage=0, endpoint=f"{host}:{port}", state=PeerState.SERVING
        )
        with pytest.raises(DeadlineExceeded, match="no answer"):
            await describe(ChannelPool(insecure=True).channel(record), REQUEST, seconds=0.2)
