"""The caller's side of calls: a deadline for every message, and errors of swarm.errors. Never asks again."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from swarm.errors import DeadlineExceeded, MalformedMessage, PeerUnavailable, SwarmError, WrongRun
from swarm.rpc.bounds import require_bounds
from swarm.rpc.failures import translate
from swarm.rpc.local import is_local
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceStub
from swarm.types import PROTOCOLS, Block

Reply = TypeVar("Reply")
SLOWEST_BYTES_PER_SECOND = 32 << 10
"""A download that is slower than this on average is given up, since another peer may be faster. One longest silence is
not counted."""


def address_of(run_id: str, block: Block, path: int = 0) -> pb.Address:
    return pb.Address(
        run_id=run_id, protocol_version=PROTOCOLS.newest, oldest_protocol=PROTOCOLS.oldest, stage=block.stage,
        variant=block.variant, path=path,
    )  # fmt: skip


async def ask(call: Callable[[Any], Awaitable[Reply]], request: Any, *, seconds: float, finite: bool = True) -> Reply:
    """Make a grpc.aio.UnaryUnaryMultiCallable's call, and return the answer; with `finite`, one that holds NaN or
    infinity is refused. Cancelling ends the call.

    Raises DeadlineExceeded if no answer comes within `seconds`, the time to connect included, PeerUnavailable if the
    peer cannot be reached or its answer is out of bounds, and the error with which the peer refuses.
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
    """Ask one peer; every number in its answer is finite. Cancelling ends the call. The seconds include the time for
    which the request makes the peer wait for its next round.

    Raises what `ask` does, and WrongRun if the peer is of another run than the request by now: it may have been started
    again at the same port.
    """
    stub: Any = StageServiceStub(channel)
    reply: pb.DescribeReply = await ask(stub.Describe, request, seconds=seconds)
    if request.run_id and reply.run_id != request.run_id:
        raise WrongRun("it is of another run by now")
    return reply


class Stream:
    """One call, in an `async with` block.

    A block that ends normally leaves the call as it is: it may go on elsewhere. If the block raises, the call is
    cancelled, and gRPC's error becomes the one of swarm.errors that says the same.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self.is_local = is_local(call)
        """Whether the peer is this very process, which takes tensors as they are."""
        self._end: grpc.aio.AioRpcError | None = None
        if not self.is_local:
            call.add_done_callback(self._keep_end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        is_over = isinstance(error, grpc.aio.BaseError | asyncio.InvalidStateError)
        if is_over or (isinstance(error, grpc.aio.AioRpcError) and self.has_ended):
            # The stream ended, perhaps while we wrote to it; its status says why.
            raise await self._status() from None
        self._call.cancel()
        if isinstance(error, grpc.aio.AioRpcError):
            raise translate(error) from None

    async def write(self, message: Any, seconds: float) -> None:
        """Send a message. Raises PeerUnavailable if the peer does not take it in this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._call.write(message)
        except TimeoutError:
            raise PeerUnavailable(f"took nothing for {seconds:.0f} s", is_unreachable=True) from None

    async def read(self, seconds: float) -> Any:
        """The next message. Raises PeerUnavailable if none comes in time, and the error of the status at the end."""
        try:
            async with asyncio.timeout(seconds):
                message = await self._call.read()
        except TimeoutError:
            raise PeerUnavailable(f"no sign of life for {seconds:.0f} s", is_unreachable=True) from None
        if message is grpc.aio.EOF:
            raise await self._status()
        return message

    async def done_writing(self) -> None:
        await self._call.done_writing()

    async def finish(self, message: Any, seconds: float) -> Any:
        """Send the last message, and wait until the peer has ended the call. Returns what it has sent before that; None
        if nothing. Raises PeerUnavailable."""
        try:
            async with asyncio.timeout(seconds):
                await self._call.write(message)
                await self._call.done_writing()
                last = await self._call.read()
                await self._call.code()
                return None if last is grpc.aio.EOF else last
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError, TimeoutError) as error:
            raise PeerUnavailable(f"not finished: {error}") from None

    def cancel(self) -> None:
        """End the call; nothing happens if it has ended."""
        self._call.cancel()

    @property
    def has_ended(self) -> bool:
        """Whether either side has ended the call, or its connection broke."""
        return bool(self._call.done())

    def _keep_end(self, call: Any) -> None:
        """Keep the status with which the call ended. If a message is on its way just then, gRPC puts an internal error
        in the status's place later."""
        self._end = grpc.aio.AioRpcError(
            _at_once(call.code()),
            _at_once(call.initial_metadata()),
            _at_once(call.trailing_metadata()),
            details=_at_once(call.details()),
        )

    async def _status(self) -> SwarmError:
        """The error that says why the call ended."""
        await self._call.code()
        if self._end is None:
            self._keep_end(self._call)
        assert self._end is not None
        if self._end.code() is grpc.StatusCode.OK:
            return PeerUnavailable("the peer ended the stream early")
        return translate(self._end)


def _at_once(work: Coroutine[Any, Any, Reply]) -> Reply:
    """The result of `work`, which waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        result: Reply = end.value
        return result
    raise AssertionError("it waits")


async def download(call: Any, peer_id: str, *, silence_seconds: float) -> AsyncGenerator[Any, None]:
    """Yield the messages of a grpc.aio.UnaryStreamCall, of which each may take `silence_seconds`. Closing this
    generator cancels the call.

    Raises DeadlineExceeded if the peer is silent or too slow, PeerUnavailable if the call ends early, and the error
    with which the peer ends it.
    """
    time = asyncio.get_running_loop().time
    waited_seconds = num_bytes = 0.0
    try:
        while True:
            asked_at = time()
            async with asyncio.timeout(silence_seconds):
                reply = await call.read()
            if reply is grpc.aio.EOF:
                # A bad status is known only at the end of the stream.
                if await call.code() is not grpc.StatusCode.OK:
                    raise PeerUnavailable(f"the download from {peer_id} ended early")
                return
            waited_seconds += time() - asked_at
            num_bytes += reply.ByteSize()
            if waited_seconds > silence_seconds + num_bytes / SLOWEST_BYTES_PER_SECOND:
                raise DeadlineExceeded(f"only {num_bytes:.0f} bytes came from {peer_id} in {waited_seconds:.0f} s")
            yield reply
    except TimeoutError:
        raise DeadlineExceeded(f"nothing came from {peer_id} for {silence_seconds} s") from None
    except grpc.aio.AioRpcError as error:
        raise translate(error) from None
    finally:
        call.cancel()
