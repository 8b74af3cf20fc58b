"""The call that asks a stage peer to describe itself.

Used by the trainer, which follows rounds, by peers that begin or move, by swarm-status, and by the benches.
"""

from typing import Any

import grpc

from swarm.errors import WrongRun
from swarm.rpc.ask import ask
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceStub


async def describe(channel: grpc.aio.Channel, request: pb.DescribeRequest, *, seconds: float) -> pb.DescribeReply:
    """Ask one peer; every number in its answer is finite. Cancelling ends the call.

    Args:
        seconds: longest wait for the answer. It includes the time to connect, and the time for which the request makes
            the peer wait for its next round.

    Raises:
        WrongRun: the request names a run, and the peer is of another one by now: it may have been started again at the
            same port.
        SwarmError: what `ask` raises.
    """
    stub: Any = StageServiceStub(channel)
    reply: pb.DescribeReply = await ask(stub.Describe, request, seconds=seconds)
    if request.run_id and reply.run_id != request.run_id:
        raise WrongRun("it is of another run by now")
    return reply
