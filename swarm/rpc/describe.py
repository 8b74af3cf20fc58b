"""What a stage peer says of itself: the one call with which anything else asks for it.

Used by the trainer, which follows rounds, by peers that begin or move, by swarm-status, and by the benches. It believes
nothing beyond the bounds of a message: what the answer means is for the caller to judge.
"""

import asyncio
from typing import Any

import grpc

from swarm.errors import DeadlineExceeded, WrongRun
from swarm.rpc.bounds import require_bounds
from swarm.rpc.channels import translate
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceStub


async def describe(channel: grpc.aio.Channel, request: pb.DescribeRequest, *, seconds: float) -> pb.DescribeReply:
    """Ask one peer; every number in its answer is finite. Cancelling ends the call.

    Args:
        seconds: longest wait for the answer. It includes the time to connect, and the time that the request has the
            peer wait for its next round.

    Raises:
        DeadlineExceeded: there was no answer in this time.
        WrongRun: the request names a run, and the peer is of another one by now: it may have been started again at the
            same port.
        MalformedMessage: the answer has a number or a list that is out of bounds.
        SwarmError: what the peer refused with, or PeerUnavailable where it cannot be reached.
    """
    call: Any = StageServiceStub(channel).Describe
    try:
        async with asyncio.timeout(seconds):
            reply: pb.DescribeReply = await call(request)
    except TimeoutError:
        raise DeadlineExceeded("no answer") from None
    except grpc.aio.AioRpcError as error:
        raise translate(error) from error
    if request.run_id and reply.run_id != request.run_id:
        raise WrongRun("it is of another run by now")
    # The figures are added up and written down, and JSON knows neither NaN nor infinity.
    require_bounds(reply, finite=True)
    return reply
