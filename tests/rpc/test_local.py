"""A call within one process begins, goes on and ends as one over gRPC does: every test here runs with both."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc
import pytest

from swarm.errors import NotReady, Overloaded, PeerUnavailable, SwarmError
from swarm.rpc.ask import Stream
from swarm.rpc.callers import OWN, Caller, Callers, caller_of
from swarm.rpc.failures import abort
from swarm.rpc.local import LocalBlock, LocalCall, is_local
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.stage.call import Incoming

Behaviour = Callable[[Any, Any], Awaitable[None]]
_SECONDS = 5.0


class _Servicer:
    def __init__(self, behaviour: Behaviour) -> None:
        self.Train = behaviour


def _message(microbatch: int = 0) -> pb.TrainRequest:
    return pb.TrainRequest(open=pb.Open(microbatch=microbatch))


@pytest.fixture(params=["grpc", "local"])
async def call(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[Behaviour], Awaitable[Any]]]:
    """Begins a call that a behaviour answers. Messages are pb.TrainRequest both ways."""
    async with AsyncExitStack() as stack:

        async def begin(behaviour: Behaviour) -> Any:
            if request.param == "local":
                block = LocalBlock(_Servicer(behaviour), None)
                stack.push_async_callback(block.stop, 0.0)
                return block.Train()
            kinds: list[Any] = [pb.TrainRequest.FromString, pb.TrainRequest.SerializeToString]
            server = grpc.aio.server(options=SERVER_OPTIONS)
            handlers: Any = {"Train": grpc.stream_stream_rpc_method_handler(behaviour, *kinds)}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
            port = bind_server(server, "127.0.0.1", 0, None)
            await server.start()
            stack.push_async_callback(server.stop, None)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
            return channel.stream_stream("/test/Train", *reversed(kinds))()

        yield begin


Begin = Callable[[Behaviour], Awaitable[Any]]


async def test_messages_go_both_ways_until_each_side_ends(call: Begin) -> None:
    async def double(_: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(_message(2 * message.open.microbatch))
        await context.write(_message(99))

    async with Stream(stream := await call(double)) as caller:
        for number in (1, 2):
            await caller.write(_message(number), _SECONDS)
            assert (await caller.read(_SECONDS)).open.microbatch == 2 * number
        await caller.done_writing()
        assert (await caller.read(_SECONDS)).open.microbatch == 99
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
        assert caller.has_ended


@pytest.mark.parametrize("error", [NotReady("not yet"), Overloaded("full", retry_after_seconds=0.5)])
async def test_a_refusal_is_the_servicers_error_after_what_it_has_said(call: Begin, error: SwarmError) -> None:
    async def refuse(_: Any, context: Any) -> None:
        await context.read()
        await context.write(_message(1))
        await abort(context, error)

    heard = list[int]()

    async def ask() -> None:
        async with Stream(await call(refuse)) as caller:
            await caller.write(_message(), _SECONDS)
            while True:
                heard.append((await caller.read(_SECONDS)).open.microbatch)

    with pytest.raises(type(error), match=str(error)) as raised:
        await ask()
    assert heard == [1]
    if isinstance(error, Overloaded):
        assert isinstance(raised.value, Overloaded)
        assert raised.value.retry_after_seconds == 0.5


@pytest.mark.parametrize("how", ["by a call", "by its task", "by a deadline"])
async def test_a_caller_that_goes_away_cancels_the_servicer(call: Begin, how: str) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait(_: Any, context: Any) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    stream = await call(wait)

    async def read() -> None:
        async with Stream(stream) as caller:
            await caller.read(0.2 if how == "by a deadline" else 60)

    reading = asyncio.create_task(read())
    await begun.wait()
    if how == "by a call":
        stream.cancel()
    elif how == "by its task":
        reading.cancel()
    with pytest.raises(PeerUnavailable if how == "by a deadline" else asyncio.CancelledError):
        await reading
    async with asyncio.timeout(_SECONDS):
        await ended.wait()
    assert stream.done()
    assert await stream.code() is grpc.StatusCode.CANCELLED


async def test_the_last_message_arrives_and_is_waited_for(call: Begin) -> None:
    heard = list[int]()

    async def note(_: Any, context: Any) -> None:
        heard.append((await context.read()).open.microbatch)
        assert await context.read() is grpc.aio.EOF
        heard.append(-1)

    await Stream(await call(note)).finish(_message(7), _SECONDS)
    assert heard == [7, -1]


# -- of local calls alone ----------------------------------------------------------------------------------------------


async def test_a_block_that_stops_ends_its_calls_after_a_while() -> None:
    async def wait(_: Any, context: Any) -> None:
        with suppress(asyncio.TimeoutError):
            async with asyncio.timeout(0.05):
                await context.read()
            await asyncio.sleep(60)

    block = LocalBlock(_Servicer(wait), None)
    short, long = block.Train(), block.Train()
    await long.write(_message())
    await block.stop(grace=0.5)
    assert await short.code() is grpc.StatusCode.OK
    with pytest.raises(PeerUnavailable, match="served no longer"):
        async with Stream(long) as caller:
            await caller.read(_SECONDS)


async def test_the_caller_is_the_peer_itself_of_which_no_bytes_are_counted() -> None:
    callers, found = Callers(max_bytes=1), list[Caller]()

    async def read(_: Any, context: Any) -> None:
        assert is_local(context)
        incoming = Incoming(pb.TrainRequest, context, caller_of(context), callers)
        for _ in range(2):
            incoming.expect({}, training=True)
            callers.keep(incoming.caller, 1000, training=True)
        found.append(incoming.caller)

    assert isinstance(call := LocalBlock(_Servicer(read), None).Train(), LocalCall)
    assert await call.code() is grpc.StatusCode.OK
    assert (found, callers.num_bytes) == ([OWN], 0)
