"""The gRPC face of averaging: AveragingService.

It passes requests to averaging/handlers and returns the answers. The stage peer's program adds it to its server. It
decides nothing and keeps nothing.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from swarm.averaging import messages
from swarm.averaging.exchanging.reduction import MemberFailed
from swarm.averaging.handlers import Handlers
from swarm.averaging.transport import ABORT, AVERAGE, BARRIER, BEGIN, COMMIT, REPORT, Method, Reply, Request, pieces_of
from swarm.errors import DeadlineExceeded, Fatal, MalformedMessage, NotServed, PeerUnavailable, SwarmError
from swarm.rpc.callers import bearer_of
from swarm.rpc.failures import abort
from swarm.rpc.serving import MESSAGE_SECONDS
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.averaging_pb2_grpc import AveragingServiceServicer

logger = logging.getLogger(__name__)

Context = Any
"""Stands for grpc.aio.ServicerContext, which has other type arguments in each call."""


class AveragingServicer(AveragingServiceServicer):
    """Serves one averager's handlers."""

    def __init__(self, handlers: Handlers, *, own_id: str) -> None:
        self._handlers = handlers
        self._own_id = own_id

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportReply:
        return await self._answer(REPORT, request, context)

    async def Begin(self, request: pb.BeginRequest, context: Context) -> pb.BeginReply:
        return await self._answer(BEGIN, request, context)

    async def Average(self, request: pb.AverageRequest, context: Context) -> pb.AverageReply:
        return await self._answer(AVERAGE, request, context)

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitReply:
        return await self._answer(COMMIT, request, context)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortReply:
        return await self._answer(ABORT, request, context)

    async def Barrier(self, request: pb.BarrierRequest, context: Context) -> pb.BarrierReply:
        return await self._answer(BARRIER, request, context)

    async def Exchange(self, request_iterator: Any, context: Context) -> AsyncIterator[pb.ExchangeReply]:
        try:
            first = await _next(request_iterator)
            if first is None or first.WhichOneof("message") != "open":
                raise MalformedMessage("an exchange begins with its open message")
            reduced = await self._handlers.exchange(first.open, _pieces(request_iterator))
        except (Fatal, NotServed) as error:
            await abort(context, error)
        except SwarmError as error:
            # Sent as an answer, not as a gRPC error, because the caller must learn which member is at fault.
            if not isinstance(error, MemberFailed):
                error = MemberFailed(self._own_id, str(error), noticed_by=self._own_id)
            yield pb.ExchangeReply(failure=messages.pack_failure(error))
            return
        yield pb.ExchangeReply(reduced=pb.Reduced(squared_norm=reduced.squared_norm))
        for piece in pieces_of(reduced.encoded):
            yield pb.ExchangeReply(data=piece)

    async def Shared(self, request: pb.SharedRequest, context: Context) -> AsyncIterator[pb.SharedReply]:
        try:
            encoded = await self._handlers.shared(request)
        except SwarmError as error:
            await abort(context, error)
        for piece in pieces_of(encoded):
            yield pb.SharedReply(data=piece)

    async def Download(self, request: pb.DownloadRequest, context: Context) -> AsyncIterator[pb.DownloadReply]:
        try:
            async with aclosing(self._handlers.download(request, bearer_of(context))) as replies:
                async for reply in replies:
                    yield reply
        except SwarmError as error:
            await abort(context, error)

    async def _answer(self, method: Method[Request, Reply], request: Request, context: Context) -> Reply:
        try:
            return await self._handlers.handle(method, request)
        except SwarmError as error:
            await abort(context, error)
        except Exception as error:
            logger.exception("%s failed", method.name)
            await abort(context, PeerUnavailable(f"internal error: {type(error).__name__}"))


async def _pieces(requests: AsyncIterator[pb.ExchangeRequest]) -> AsyncIterator[bytes]:
    while (message := await _next(requests)) is not None:
        yield message.data


async def _next(requests: AsyncIterator[pb.ExchangeRequest]) -> pb.ExchangeRequest | None:
    """The next message, or None at the end of the stream."""
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            return await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded(f"no message for {MESSAGE_SECONDS} s") from None
