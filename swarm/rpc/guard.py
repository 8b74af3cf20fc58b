"""Decides which caller may make which call (credentials/rights.py), before any servicer of a peer sees the call.

In a locked run no member may send in another one's name either. In both kinds of run the calls of each caller are
counted.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import isasyncgenfunction
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from swarm.credentials.authority import Authority
from swarm.credentials.rights import CALLS, require_call
from swarm.errors import MalformedMessage, NotAllowed, Overloaded, SwarmError
from swarm.machine.clock import Clock
from swarm.rpc.bounds import num_entries, require_bounds
from swarm.rpc.callers import MAX_CALLS, RETRY_SECONDS, Caller, Callers, Quota, caller_of, chain_of
from swarm.rpc.failures import Behaviour, abort
from swarm.rpc.serving import Context, send

SMALL_BYTES = 64 << 10
"""Requests and answers up to this size are not counted, because all that can be under way take little memory."""
PIECE_SECONDS = 120.0
"""How long a caller may take to receive one piece of an average or download: a whole group may share a slow line."""


@dataclass(frozen=True)
class Unreadable:
    """Stands in for a request that cannot be read; gRPC itself would write a traceback into the log for each.

    It looks like a message in which no field is set, and servicers refuse such messages.
    """

    reason: str

    def WhichOneof(self, _: str) -> str:
        return "nothing that can be read"

    def HasField(self, _: str) -> bool:
        return False


@dataclass(eq=False)
class Guard(grpc.aio.ServerInterceptor):
    authority: Authority | None
    """Checks who is a member of a locked run; None in an open run, where every caller has all rights."""
    callers: Callers
    clock: Clock
    stage: Callable[[], int]
    """Gives the first stage that this peer serves now: what is not allowed there is refused at once."""
    _refused: Quota = field(default_factory=lambda: Quota("refusals", each=MAX_CALLS), init=False)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Wrap the handler of a call, which gRPC asks for when the call comes in."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method not in CALLS:
            return None
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if not handler.response_streaming:
            guarded = self._single
        else:
            guarded = self._generator if isasyncgenfunction(behaviour) else self._coroutine
        # A single answer is sent as a stream of one. The caller sees no difference, and the guard can wait for its end.
        is_streamed = handler.request_streaming
        make = grpc.stream_stream_rpc_method_handler if is_streamed else grpc.unary_stream_rpc_method_handler
        return make(
            guarded(handler_call_details.method, behaviour),
            # Calls with tensors get bytes, and read them by themselves (wire.py).
            request_deserializer=handler.request_deserializer
            and partial(_read, handler.request_deserializer, is_streamed),
            response_serializer=handler.response_serializer,
        )

    def _single(self, method: str, behaviour: Behaviour) -> Behaviour:
        async def guarded(request: Any, context: Context) -> None:
            async with self._admitted(method, request, context) as caller:
                reply = await behaviour(request, context)
                num_bytes = self._keep(caller, reply)
                try:
                    # Returns once the caller has taken the reply or is gone. Until then gRPC keeps its bytes.
                    await context.write(reply)
                finally:
                    self.callers.release(caller, num_bytes)

        return guarded

    def _coroutine(self, method: str, behaviour: Behaviour) -> Behaviour:
        async def guarded(request: Any, context: Context) -> None:
            async with self._admitted(method, request, context):
                await behaviour(request, context)

        return guarded

    def _generator(self, method: str, behaviour: Behaviour) -> Behaviour:
        async def guarded(request: Any, context: Context) -> None:
            async with self._admitted(method, request, context) as caller:
                if hasattr(request, "__aiter__"):
                    request = self._own_words(method, request, caller, chain_of(context))
                async with aclosing(behaviour(request, context)) as replies:
                    is_begun = False
                    async for reply in replies:
                        if not is_begun:
                            # Otherwise gRPC would send the metadata with the first reply, and the two would wait
                            # together for a caller that takes nothing. The call could not be aborted meanwhile.
                            await context.send_initial_metadata(())
                            is_begun = True
                        await send(context, reply, PIECE_SECONDS)

        return guarded

    @asynccontextmanager
    async def _admitted(self, method: str, request: Any, context: Context) -> AsyncIterator[Caller]:
        """Count a call, since even a refusal takes time; then check it, and serve it inside the block."""
        caller = caller_of(context)
        try:
            seconds = self.callers.enter(caller, num_entries(request) if isinstance(request, Message) else 0)
        except Overloaded as error:
            # At most MAX_CALLS wait, since waits take memory. Without a wait their caller would ask again at once.
            if self._refused.fits(caller):
                with self._refused.taken(caller):
                    await self.clock.sleep(RETRY_SECONDS)
            await abort(context, error)
        is_wasted, num_bytes = True, 0
        try:
            num_bytes = self._keep(caller, request)
            if seconds:
                # A call that is given up while it waits its turn has cost nothing.
                is_wasted = False
                await self.clock.sleep(seconds)
                is_wasted = True
            self.require_right(method, self.stage(), context)
            if isinstance(request, Message):
                require_bounds(request, finite=True)
            self._require_own_words(method, request, caller)
            yield caller
            is_wasted = False
        except SwarmError as error:
            # Waits until the caller reads or is gone. What was to be answered is freed by now.
            await abort(context, error)
        finally:
            self.callers.release(caller, num_bytes)
            self.callers.leave(caller, wasted=is_wasted)

    def _keep(self, caller: Caller, message: Any) -> int:
        """Count the bytes of a large request or answer that is held as a whole, and return them. Raises Overloaded."""
        num_bytes: int = message.ByteSize() if isinstance(message, Message) else 0
        if num_bytes <= SMALL_BYTES:
            return 0
        self.callers.keep(caller, num_bytes)
        return num_bytes

    def require_right(self, method: str, stage: int, context: Context) -> None:
        """Raise NotAllowed, in a locked run, unless the caller may make this call at a stage."""
        if self.authority is not None:
            member = self.authority.member(chain_of(context), self.clock.time())
            require_call(member.role, method, stage)

    def _require_own_words(self, method: str, request: Any, caller: Caller) -> None:
        if isinstance(request, Unreadable):
            raise MalformedMessage(request.reason)
        if self.authority is None:
            return
        claimed = _claimed_id(method, request)
        if claimed is not None and claimed != caller:
            raise NotAllowed(f"{caller[:8]} speaks for {claimed[:40]!r}")

    async def _own_words(
        self, method: str, requests: AsyncIterator[Any], caller: Caller, chain_pem: str
    ) -> AsyncIterator[Any]:
        async for request in requests:
            if self.authority is not None and self.authority.has_revoked(chain_pem):
                raise NotAllowed("the run's owner has revoked the caller's token")
            self._require_own_words(method, request, caller)
            yield request


def _read(deserialize: Callable[[bytes], Any], is_streamed: bool, data: bytes) -> Any:
    try:
        message = deserialize(data)
        # A unary request is checked later, after it has waited for its turn (_admitted).
        if is_streamed:
            require_bounds(message, finite=True)
    except DecodeError:
        return Unreadable("that is no message of this call")
    except MalformedMessage as error:
        return Unreadable(str(error))
    return message


def _claimed_id(method: str, request: Any) -> str | None:
    """The id that the sender of a request gives as its own; None if it gives none. A stream has no id of its own."""
    call = CALLS[method]
    if not call.sender or not isinstance(request, Message):
        return None
    *around, name = call.sender.split(".")
    for message in around:
        if not call.is_required and not request.HasField(message):
            return None
        request = getattr(request, message)
    claimed: str = getattr(request, name)
    return claimed
