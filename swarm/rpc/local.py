"""Calls within one process: both ends of a call to a block that this very process serves, without bytes in between.

Both ends have those methods of grpc.aio's that the swarm uses, and they do the same. So there is one code for calls of
either kind, and for all that may happen to one: refusals, deadlines, cancellation, a servicer that fails. Messages, and
the tensors in them, are passed on as they are, and nobody may change them afterwards. The guard is not asked, because
this peer itself is the caller.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, NoReturn

import grpc

from swarm.machine.words import about
from swarm.rpc.callers import OWN

logger = logging.getLogger(__name__)

MOST_MESSAGES = 8
"""The most messages on their way in each direction of a call; further ones wait."""


class _Status(NamedTuple):
    code: grpc.StatusCode
    details: str = ""
    metadata: tuple[tuple[str, str], ...] = ()


_CANCELLED = _Status(grpc.StatusCode.CANCELLED, "the caller has cancelled the call")
_STOPPED = _Status(grpc.StatusCode.UNAVAILABLE, "the block is served no longer")


class _Pipe:
    """Messages from one end to the other. Each end has one task at a time that uses it."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._has_ended = False
        self._changed = asyncio.Event()

    async def put(self, message: Any) -> None:
        """Add a message, once there is room for it. Raises InvalidStateError if the pipe has ended."""
        while len(self._messages) >= MOST_MESSAGES and not self._has_ended:
            await self._change()
        if self._has_ended:
            raise asyncio.InvalidStateError("the call has ended")
        self._messages.append(message)
        self._changed.set()

    async def get(self) -> Any:
        """The next message; EOF once all are taken and no further one comes."""
        while not self._messages and not self._has_ended:
            await self._change()
        if not self._messages:
            return grpc.aio.EOF
        self._changed.set()
        return self._messages.popleft()

    def end(self, *, drop: bool = False) -> None:
        """Take no more messages; with `drop` give none out either."""
        self._has_ended = True
        if drop:
            self._messages.clear()
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class LocalContext:
    """The servicer's end of a call, in the place of grpc.aio.ServicerContext."""

    def __init__(self, requests: _Pipe, replies: _Pipe) -> None:
        self._requests = requests
        self._replies = replies
        self.status = _Status(grpc.StatusCode.OK)

    async def read(self) -> Any:
        return await self._requests.get()

    async def write(self, message: Any) -> None:
        await self._replies.put(message)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, str], ...] = ()
    ) -> NoReturn:
        self.status = _Status(code, details, trailing_metadata)
        raise grpc.aio.AbortError(details)

    def peer(self) -> str:
        return f"{OWN}:"

    def auth_context(self) -> dict[str, Sequence[bytes]]:
        return {}


class LocalCall:
    """The caller's end of a call, in the place of grpc.aio.StreamStreamCall."""

    def __init__(self, behaviour: Callable[[Any, LocalContext], Coroutine[Any, Any, None]], request: Any) -> None:
        self._requests, self._replies = _Pipe(), _Pipe()
        self._context = LocalContext(self._requests, self._replies)
        self._status: asyncio.Future[_Status] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(behaviour(request, self._context))
        self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        # Not in the task, because a task that is cancelled before its first step never runs.
        status = self._context.status
        if task.cancelled():
            status = _STOPPED
        elif (error := task.exception()) is not None and not isinstance(error, grpc.aio.AbortError):
            logger.error("a call within this process failed", exc_info=error)
            status = _Status(grpc.StatusCode.UNKNOWN, f"internal error: {type(error).__name__}")
        self._end(status)

    def _end(self, status: _Status) -> None:
        if not self._status.done():
            self._status.set_result(status)
            self._requests.end(drop=True)
            self._replies.end(drop=status is _CANCELLED)

    async def write(self, message: Any) -> None:
        try:
            await self._requests.put(message)
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def done_writing(self) -> None:
        self._requests.end()

    async def read(self) -> Any:
        """The next message; EOF at the end. Raises AioRpcError if that is no good end, and CancelledError if this end
        has cancelled the call."""
        try:
            message = await self._replies.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if message is not grpc.aio.EOF:
            return message
        status = await self._end_status()
        if status is _CANCELLED:
            raise asyncio.CancelledError
        if status.code is not grpc.StatusCode.OK:
            trailing = await self.trailing_metadata()
            raise grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, details=status.details)
        return message

    def cancel(self) -> None:
        self._end(_CANCELLED)
        self.task.cancel()

    def done(self) -> bool:
        return self._status.done()

    async def code(self) -> grpc.StatusCode:
        return (await self._end_status()).code

    async def details(self) -> str:
        return (await self._end_status()).details

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*(await self._end_status()).metadata)

    async def _end_status(self) -> _Status:
        return await asyncio.shield(self._status)


def is_local(end: Any) -> bool:
    return isinstance(end, LocalCall | LocalContext)


class LocalBlock:
    """A block of this process, for callers in it: the methods are those of stubs for gRPC."""

    def __init__(self, stage: Any, generation: Any, prefix: str = "") -> None:
        """The two servicers are also those that other processes reach over gRPC. Lines of the log that calls write
        begin with the prefix."""
        self._prefix = prefix
        self._stage = stage
        self._generation = generation
        self._under_way: set[asyncio.Task[None]] = set()

    def Train(self) -> LocalCall:
        return self._begin(self._stage.Train)

    def Evaluate(self) -> LocalCall:
        return self._begin(self._stage.Evaluate)

    def Hold(self, request: Any) -> LocalCall:
        return self._begin(self._stage.Hold, request)

    def Generate(self) -> LocalCall:
        return self._begin(self._generation.Generate)

    async def stop(self, grace: float) -> None:
        """End all calls that do not end by themselves within `grace` seconds, as grpc.aio.Server.stop does. The caller
        sees to it that no call begins after this."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=grace)
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)

    def _begin(
        self, behaviour: Callable[[Any, LocalContext], Coroutine[Any, Any, None]], request: Any = None
    ) -> LocalCall:
        with about(self._prefix):
            call = LocalCall(behaviour, request)
        self._under_way.add(call.task)
        call.task.add_done_callback(self._under_way.discard)
        return call
