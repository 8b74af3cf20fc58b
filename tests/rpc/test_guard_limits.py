"""How much one caller may ask for, and leave lying: real servers with real TLS."""

import asyncio
from typing import Any

import grpc
import pytest

from swarm.credentials.identity import Identity
from swarm.rpc import guard
from swarm.rpc.callers import BURST_CALLS, WASTED_CALLS
from swarm.rpc.v1 import averaging_pb2
from swarm.rpc.v1.averaging_pb2_grpc import AveragingServiceStub
from swarm.rpc.v1.directory_pb2_grpc import DirectoryServiceStub
from tests.rpc.guarded import LARGE, READ, SMALL, asking_without_taking, calls_of, code_of, is_served
from tests.support import locked
from tests.support.chain import eventually
from tests.support.locked import OTHER_PEER, PEER


@pytest.mark.parametrize(("server_is", "caller"), [(PEER, OTHER_PEER), (locked.OPEN, locked.OPEN)])
async def test_the_calls_of_one_caller_are_counted(start: Any, server_is: Identity, caller: Identity) -> None:
    server = await start(server_is)
    async with server.called_by(caller) as channel:
        stub: Any = AveragingServiceStub(channel)
        idle = [stub.Exchange() for _ in range(2)]
        for call in idle:
            await call.write(averaging_pb2.ExchangeRequest(data=b"x"))
        await eventually(lambda: server.callers.num_calls == 2)
        assert await code_of(stub.Exchange()) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in idle:
            call.cancel()
        await eventually(lambda: server.callers.num_calls == 0)
        assert is_served(await code_of(calls_of(channel, caller)["/swarm.rpc.v1.StageService/Describe"]()))


async def test_nonsense_waits_its_turn_as_well(start: Any) -> None:
    """To refuse a call costs as much as to answer it."""
    server = await start(max_calls=1000)
    async with server.called_by(OTHER_PEER) as channel:
        nonsense = channel.unary_unary("/swarm.rpc.v1.AveragingService/Begin")
        for at_once in (BURST_CALLS // WASTED_CALLS, 20):
            assert server.clock.num_waits == 0
            codes = await asyncio.gather(*(code_of(nonsense(b"\xff")) for _ in range(at_once)))
            assert set(codes) == {grpc.StatusCode.INVALID_ARGUMENT}
        assert server.clock.num_waits == 20


async def test_a_call_goes_on_until_its_answer_is_taken(start: Any) -> None:
    """gRPC would hold any number of answers for a caller that takes none."""
    server = await start(locked.OPEN)
    async with asking_without_taking(server, READ, LARGE, times=2), server.called_by(locked.OPEN) as channel:
        await eventually(lambda: server.callers.num_bytes > 2 << 20)
        assert server.callers.num_calls == 2
        stub: Any = DirectoryServiceStub(channel)
        assert await code_of(stub.Read(SMALL)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await eventually(lambda: server.callers.num_calls == server.callers.num_bytes == 0)


async def test_answers_that_are_not_taken_have_a_limit(start: Any) -> None:
    server = await start(locked.OPEN, max_calls=1000, max_bytes=3 << 19)
    async with server.called_by(locked.OPEN) as channel:
        stub: Any = DirectoryServiceStub(channel)
        async with asking_without_taking(server, READ, LARGE):
            await eventually(lambda: server.callers.num_bytes > 1 << 20)
            assert await code_of(stub.Read(LARGE)) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await code_of(stub.Read(SMALL)) is grpc.StatusCode.OK
        await eventually(lambda: server.callers.num_bytes == 0)
        for _ in range(3):
            assert await code_of(stub.Read(LARGE)) is grpc.StatusCode.OK


async def test_who_takes_no_byte_of_an_answer_is_cut_off_and_counted(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC keeps the bytes of an answer until the connection ends."""
    monkeypatch.setattr(guard, "PIECE_SECONDS", 0.3)
    server = await start(locked.OPEN)
    shared = b"/swarm.rpc.v1.AveragingService/Shared"
    async with asking_without_taking(server, shared, averaging_pb2.SharedRequest()):
        await eventually(lambda: server.averaging.num_answering == 1)
        await eventually(lambda: server.averaging.num_answering == 0)
        await asyncio.sleep(0.1)
        assert server.callers.num_calls == 1
    await eventually(lambda: server.callers.num_calls == 0)
