"""Calls to a process that serves several blocks come to the servicer of the block that they name."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from swarm.credentials.rights import Role, require_call
from swarm.errors import NotAllowed, SwarmError, WrongStage
from swarm.machine.words import ABOUT
from swarm.rpc import dispatch as dispatches
from swarm.rpc.dispatch import BlockHandlers, Dispatch
from swarm.rpc.failures import abort, translate
from swarm.rpc.serving import check_address
from swarm.rpc.v1 import averaging_pb2, stage_pb2
from swarm.rpc.v1.averaging_pb2_grpc import (
    AveragingServiceServicer,
    AveragingServiceStub,
    add_AveragingServiceServicer_to_server,
)
from swarm.rpc.v1.stage_pb2 import Address
from swarm.rpc.v1.stage_pb2_grpc import StageServiceServicer
from swarm.rpc.wire import add_stage_servicer, parsed, stage_stub
from swarm.types import PROTOCOLS, Block
from tests.support.chain import PATIENCE_SECONDS

RUN = "run"


def address(stage: int) -> Address:
    return Address(run_id=RUN, protocol_version=PROTOCOLS.newest, stage=stage)


class _Checked:
    def __init__(self, stage: int) -> None:
        self.stage = stage

    async def check(self, named: Address, context: Any) -> None:
        try:
            check_address(named, run_id=RUN, block=Block(self.stage))
        except SwarmError as error:
            await abort(context, error)


class _Stage(_Checked, StageServiceServicer):
    """Counts the messages of a stream, and names its stage."""

    async def Describe(self, request: Any, context: Any) -> Any:
        return stage_pb2.DescribeReply(stage=self.stage, waiting_for=ABOUT.get())

    async def Hold(self, request: Any, context: Any) -> None:  # type: ignore[override]
        await self.check(request.address, context)
        await context.write(stage_pb2.HoldReply(held=stage_pb2.Held(round=self.stage)))

    async def Train(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        num_messages = 0
        while (data := await context.read()) is not grpc.aio.EOF:
            message, _ = parsed(stage_pb2.TrainRequest, data)
            if not num_messages:
                await self.check(message.open.address, context)
            num_messages += 1
        await context.write(stage_pb2.TrainReply(progress=stage_pb2.Progress(stage=10 * self.stage + num_messages)))


class _Averaging(_Checked, AveragingServiceServicer):
    async def Report(self, request: Any, context: Any) -> Any:
        await self.check(request.address, context)
        return averaging_pb2.ReportReply(num_alive=self.stage)

    async def Exchange(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        messages = [message async for message in request_iterator]
        await self.check(messages[0].open.address, context)
        yield averaging_pb2.ExchangeReply(data=bytes([self.stage, len(messages)]))

    async def Download(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self.check(request.address, context)
        for _ in range(2):
            yield averaging_pb2.DownloadReply(data=bytes([self.stage]))


def _allow(method: str, stage: int, context: Any) -> None:
    require_call(Role.TRAINER, method, stage)


@asynccontextmanager
async def _serving(*stages: int, allow: dispatches.Allow = lambda method, stage, context: None) -> AsyncIterator[Any]:
    """A channel to a process that serves these stages."""
    server, dispatch = grpc.aio.server(), Dispatch(allow)
    server.add_generic_rpc_handlers((dispatch,))
    port = server.add_insecure_port("127.0.0.1:0")
    for stage in stages:
        handlers: Any = BlockHandlers(f"stage {stage}: ")
        add_stage_servicer(_Stage(stage), handlers)  # type: ignore[abstract]
        add_AveragingServiceServicer_to_server(_Averaging(stage), handlers)  # type: ignore[abstract]
        dispatch.add(Block(stage), handlers)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def _refusal(channel: Any, stage: int) -> SwarmError:
    """Why a microbatch is refused at a stage. A caller that still writes may get an error of gRPC's own, so this one
    writes no more."""
    call = stage_stub(channel).Train()
    await call.write(stage_pb2.TrainRequest(open=stage_pb2.Open(address=address(stage))))
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call.read()
    return translate(refusal.value)


def _train(channel: Any, stage: int) -> Any:
    def requests() -> Iterator[stage_pb2.TrainRequest]:
        yield stage_pb2.TrainRequest(open=stage_pb2.Open(address=address(stage)))
        yield stage_pb2.TrainRequest(ack=stage_pb2.Ack())

    return stage_stub(channel).Train(requests())


async def _all(replies: Any) -> list[Any]:
    return [reply async for reply in replies]


async def test_every_kind_of_call_comes_to_its_block_with_all_its_messages() -> None:
    async with _serving(3, 4) as channel:
        averaging: Any = AveragingServiceStub(channel)
        for stage in (3, 4):
            report = averaging_pb2.ReportRequest(address=address(stage))
            assert (await averaging.Report(report)).num_alive == stage
            pieces = [
                averaging_pb2.ExchangeRequest(open=averaging_pb2.ExchangeOpen(address=address(stage))),
                averaging_pb2.ExchangeRequest(data=b"x"),
            ]
            assert [reply.data for reply in await _all(averaging.Exchange(iter(pieces)))] == [bytes([stage, 2])]
            download = averaging_pb2.DownloadRequest(address=address(stage))
            assert [reply.data for reply in await _all(averaging.Download(download))] == [bytes([stage])] * 2
            hold = stage_pb2.HoldRequest(address=address(stage))
            assert [reply.held.round for reply in await _all(stage_stub(channel).Hold(hold))] == [stage]
            (progress,) = await _all(_train(channel, stage))
            assert stage_pb2.TrainReply.FromString(progress).progress.stage == 10 * stage + 2


async def test_a_block_that_is_not_served_is_refused_as_a_wrong_stage_is() -> None:
    async with _serving(3, 4) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await AveragingServiceStub(channel).Report(averaging_pb2.ReportRequest(address=address(5)))
        assert isinstance(translate(refusal.value), WrongStage)
        assert isinstance(await _refusal(channel, 5), WrongStage)


async def test_the_block_that_is_asked_for_describes_itself_and_without_one_the_first() -> None:
    async with _serving(3, 4) as channel:
        stub: Any = stage_stub(channel)
        asked = stage_pb2.DescribeRequest
        for request, stage in ((asked(), 3), (asked(stage=3), 3), (asked(stage=4), 4), (asked(stage=4, variant=1), 3)):
            reply = await stub.Describe(request)
            assert (reply.stage, reply.waiting_for) == (stage, f"stage {stage}: "), "and its lines of the log name it"


async def test_a_trainer_may_feed_the_first_stage_and_no_other_one_of_the_process() -> None:
    """The guard, which comes first, asks for the first stage alone: it does not know yet which one is meant."""
    async with _serving(0, 1, allow=_allow) as channel:
        assert await _all(_train(channel, 0))
        assert isinstance(await _refusal(channel, 1), NotAllowed)


async def test_a_silent_stream_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatches, "FIRST_SECONDS", 0.1)
    async with _serving(0, 1) as channel:
        call = stage_stub(channel).Train()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
