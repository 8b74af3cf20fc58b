"""Every way in which a call fails is one of the library's errors."""

import asyncio
import math
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from swarm.errors import DeadlineExceeded, Overloaded, PeerUnavailable, SwarmError, UnknownCall, WrongRun
from swarm.rpc.ask import Stream, ask, describe
from swarm.rpc.channels import ChannelPool
from swarm.rpc.failures import abort
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PeerRecord, PeerState
from tests.support.describing import describing

REQUEST = pb.DescribeRequest(run_id="run")


def _refuse(request: pb.DescribeRequest) -> pb.DescribeReply:
    raise RuntimeError("a bug")


@pytest.mark.parametrize(
    ("say", "error"),
    [
        (lambda _: pb.DescribeReply(run_id="another"), WrongRun),
        (lambda _: pb.DescribeReply(run_id="run", samples_per_second=math.inf), PeerUnavailable),
        (_refuse, PeerUnavailable),
    ],
)
async def test_an_answer_that_is_of_no_use_is_an_error(
    say: Callable[[pb.DescribeRequest], pb.DescribeReply], error: type[SwarmError]
) -> None:
    async with describing(0, say) as record:
        with pytest.raises(error):
            await describe(ChannelPool(insecure=True).channel(record), REQUEST, seconds=5.0)


async def test_a_call_that_an_older_release_does_not_have_is_no_fault_of_the_peer() -> None:
    async with describing(0, _refuse) as record:
        channel = ChannelPool(insecure=True).channel(record)
        call: Any = channel.unary_unary("/swarm.rpc.v1.StageService/Divine", pb.DescribeRequest.SerializeToString)
        with pytest.raises(UnknownCall):
            await ask(call, REQUEST, seconds=5.0)


async def test_a_peer_that_says_nothing_is_late() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        record = PeerRecord(
            peer_id="a" * 40, announced_at=0.0, stage=0, endpoint=f"127.0.0.1:{silent.getsockname()[1]}",
            state=PeerState.SERVING,
        )  # fmt: skip
        channels = ChannelPool(insecure=True)
        with pytest.raises(DeadlineExceeded, match="no answer"):
            await describe(channels.channel(record), REQUEST, seconds=0.2)
        await channels.close()


async def test_a_call_that_breaks_while_its_end_is_written_is_a_failed_peer() -> None:
    """gRPC's core may notice the break first, and then raises another error, which would end this process."""

    async def taken(*_: Any) -> None:
        return None

    async def broken() -> None:
        raise grpc.aio.InternalError("Failed execute_batch")

    call = SimpleNamespace(write=taken, done_writing=broken, code=taken, add_done_callback=lambda _: None)
    with pytest.raises(PeerUnavailable, match="not finished"):
        await Stream(call).finish(b"", 5.0)


async def test_a_refusal_that_meets_a_message_on_its_way_is_told_as_it_is() -> None:
    """gRPC puts an internal error in the place of about every thirtieth such status."""
    server = grpc.aio.server()

    async def refuse(_: Any, context: Any) -> None:
        await abort(context, Overloaded("no room", retry_after_seconds=1.0))

    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("swarm", {"Take": grpc.stream_stream_rpc_method_handler(refuse)})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            take: Any = channel.stream_stream("/swarm/Take")
            for tried in range(400):
                with pytest.raises(Overloaded, match="no room"):  # noqa: PT012 - the status comes with either
                    async with Stream(take()) as call:
                        await asyncio.sleep(tried % 20 / 5000)
                        await call.write(b"x" * 100, 5.0)
                        await call.read(5.0)
    finally:
        await server.stop(0)
