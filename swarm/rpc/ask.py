"""The caller's side of a call with one message each way: one deadline, and errors of swarm.errors.

In an answer only the bounds of numbers and lists are checked. The caller has to judge what they mean. Never asks again.
`describe` is the call that asks a stage peer to describe itself.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from swarm.errors import DeadlineExceeded, MalformedMessage, PeerUnavailable, WrongRun
from swarm.rpc.bounds import require_bounds
from swarm.rpc.failures import translate
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceStub

Reply = TypeVar("Reply")


async def ask(call: Callable[[Any], Awaitable[Reply]], request: Any, *, seconds: float, finite: bool = True) -> Reply:
    """Ask a peer, and return its answer. Cancelling ends the call.

    Args:
        call: a grpc.aio.UnaryUnaryMultiCallable.
        seconds: longest wait for the answer, the time to connect included.
        finite: whether an answer that holds NaN or infinity is refused.

    Raises:
        DeadlineExceeded: no answer came within `seconds`.
        PeerUnavailable: the peer cannot be reached, or the answer has a number or a list that is out of bounds.
        SwarmError: the error with which the peer refused.
    """
    try:
        # Not wait_for: in Python 3.11 it loses a cancellation that comes together with the answer.
        async with asyncio.timeout(seconds):
            reply = await call(request)
        # Callers add figures up and write them as JSON, which knows neither NaN nor infinity.
        require_bounds(reply, finite=finite)
    except TimeoutError:
        raise DeadlineExceeded(f"no answer within {seconds:.3g} s") from None
    except grpc.aio.AioRpcError as error:
        raise translate(error) from None
    except MalformedMessage as error:
        raise PeerUnavailable(f"a malformed answer: {error}") from None
    return reply


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
