"""One peer's answers to others: AveragingService over gRPC, and the handlers that give each call to the part that
answers it.

Every call is checked here. Nothing is decided here about a round.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import MemberFailed
from swarm.averaging.barrier import Barrier
from swarm.averaging.donor import Donor
from swarm.averaging.participant import Participant
from swarm.averaging.vectors.shared import TiedParameters
from swarm.averaging.watch import RoundWatch
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import (
    ABORT,
    AVERAGE,
    BARRIER,
    BEGIN,
    COMMIT,
    REPORT,
    Method,
    Payload,
    Reply,
    Request,
    pieces_of,
)
from swarm.compression.codec import Buffer
from swarm.errors import Fatal, MalformedMessage, NotServed, SwarmError
from swarm.machine.out_of_memory import is_out_of_memory
from swarm.rpc.callers import Caller, token_or_address_of
from swarm.rpc.failures import answers_errors
from swarm.rpc.serving import MESSAGE_SECONDS, check_address, in_time
from swarm.rpc.serving import Context as GrpcContext
from swarm.rpc.transfers import NOBODY
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.averaging_pb2_grpc import AveragingServiceServicer
from swarm.rpc.v1.stage_pb2 import Address


@dataclass(eq=False)
class Handlers:
    """Answers the calls of other peers.

    Each method raises WrongRun, IncompatibleVersion or WrongStage for a call that is not meant for this peer, and
    NotReady before this peer averages. It also raises what the answering part raises.
    """

    context: Context
    participant: Participant
    donor: Donor
    tied: TiedParameters
    barrier: Barrier
    watch: RoundWatch

    @cached_property
    def _answers(self) -> dict[str, Callable[[Any], Any]]:
        return {REPORT.name: self.watch.answer, BARRIER.name: self.barrier.answer, **self.participant.answers}

    async def handle(self, method: Method[Request, Reply], request: Request) -> Reply:
        message: Any = request
        self._check(message.address)
        with self._ends_without_memory():
            reply: Reply = await self._answers[method.name](request)
        self.context.changes.signal()
        return reply

    async def serve(self, opening: pb.ExchangeOpen, pieces: AsyncIterator[bytes]) -> Payload:
        self._check(opening.address)
        with self._ends_without_memory():
            return await self.participant.serve(opening, pieces)

    async def download(
        self, request: pb.DownloadRequest, caller: Caller = NOBODY
    ) -> AsyncGenerator[pb.DownloadReply, None]:
        self._check(request.address)
        async with aclosing(self.donor.serve(request, caller)) as replies:
            async for reply in replies:
                yield reply

    async def shared(self, request: pb.SharedRequest) -> Buffer:
        """Return this stage's average of tied parameters to another stage that holds them."""
        self._check(request.address)
        return self.tied.answer(request)

    @contextmanager
    def _ends_without_memory(self) -> Iterator[None]:
        """If the block runs out of memory, end the whole averager with that error.

        Otherwise this peer would be left out round after round, and nothing that it computes would count.
        """
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                self.context.tasks.spawn(_raise(error))
            raise

    def _check(self, address: Address) -> None:
        check_address(address, run_id=self.context.config.run_id, block=self.context.own.block)
        self.context.tasks.require_running()


async def _raise(error: Exception) -> None:
    raise error


@answers_errors
class AveragingServicer(AveragingServiceServicer):
    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers

    async def Report(self, request: pb.ReportRequest, context: GrpcContext) -> pb.ReportReply:
        return await self._handlers.handle(REPORT, request)

    async def Begin(self, request: pb.BeginRequest, context: GrpcContext) -> pb.BeginReply:
        return await self._handlers.handle(BEGIN, request)

    async def Average(self, request: pb.AverageRequest, context: GrpcContext) -> pb.AverageReply:
        return await self._handlers.handle(AVERAGE, request)

    async def Commit(self, request: pb.CommitRequest, context: GrpcContext) -> pb.CommitReply:
        return await self._handlers.handle(COMMIT, request)

    async def Abort(self, request: pb.AbortRequest, context: GrpcContext) -> pb.AbortReply:
        return await self._handlers.handle(ABORT, request)

    async def Barrier(self, request: pb.BarrierRequest, context: GrpcContext) -> pb.BarrierReply:
        return await self._handlers.handle(BARRIER, request)

    async def Exchange(self, request_iterator: Any, context: GrpcContext) -> AsyncIterator[pb.ExchangeReply]:
        try:
            first = await in_time(anext(request_iterator, None), MESSAGE_SECONDS)
            if first is None or first.WhichOneof("message") != "open":
                raise MalformedMessage("an exchange begins with its open message")
            reduced = await self._handlers.serve(first.open, _pieces(request_iterator))
        except (Fatal, NotServed):
            raise
        except SwarmError as error:
            # Sent as an answer, not as a gRPC error, because the caller must learn which member is at fault.
            if not isinstance(error, MemberFailed):
                own_id = self._handlers.context.own_id
                error = MemberFailed(own_id, str(error), noticed_by=own_id)
            yield pb.ExchangeReply(failure=messages.pack_failure(error))
            return
        deviations = messages.pack_deviations(reduced.deviations)
        yield pb.ExchangeReply(reduced=pb.Reduced(squared_norm=reduced.squared_norm, deviations=deviations))
        for piece in pieces_of(reduced.encoded):
            yield pb.ExchangeReply(data=piece)

    async def Shared(self, request: pb.SharedRequest, context: GrpcContext) -> AsyncIterator[pb.SharedReply]:
        for piece in pieces_of(await self._handlers.shared(request)):
            yield pb.SharedReply(data=piece)

    async def Download(self, request: pb.DownloadRequest, context: GrpcContext) -> AsyncIterator[pb.DownloadReply]:
        async with aclosing(self._handlers.download(request, token_or_address_of(context))) as replies:
            async for reply in replies:
                yield reply


async def _pieces(requests: AsyncIterator[pb.ExchangeRequest]) -> AsyncIterator[bytes]:
    while (message := await in_time(anext(requests, None), MESSAGE_SECONDS)) is not None:
        yield message.data
