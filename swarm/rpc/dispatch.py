"""One gRPC server for several blocks: hands each call to the servicer of the block that its request names.

Each block has servicers of its own, which check the whole address. A request for a block that is not served here goes
to the servicer of the first one, which refuses it. The guard (guard.py) comes before, and does not know the block yet.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any

import grpc

from swarm.errors import MalformedMessage, NotReady
from swarm.machine.words import ABOUT
from swarm.rpc.failures import refusing
from swarm.rpc.serving import in_time
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.wire import parsed
from swarm.types import Block

FIRST_SECONDS = 10.0
"""Longest wait for the first message of a stream. A silent stream is not kept."""
_BARE = {
    "/swarm.rpc.v1.StageService/Evaluate": pb.EvaluateRequest,
    "/swarm.rpc.v1.StageService/Train": pb.TrainRequest,
}
"""The messages of those calls whose servicers get bytes (wire.add_stage_servicer)."""
_MAKERS: dict[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}

Allow = Callable[[str, int, Any], None]
"""Raises NotAllowed unless the caller of a call, given by its method and context, may make it at a stage."""


class BlockHandlers:
    """Takes the place of a server for the servicers of one block: gRPC's functions add them to it."""

    def __init__(self, prefix: str = "") -> None:
        """Lines of the log that calls write begin with the prefix."""
        self.prefix = prefix
        self._generic: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        self._generic.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Do nothing: these are the same handlers once more."""

    def find(self, details: grpc.HandlerCallDetails) -> Any:
        return next((found for generic in self._generic if (found := generic.service(details)) is not None), None)


class Dispatch(grpc.GenericRpcHandler):
    """The handlers of the blocks that a process serves."""

    def __init__(self, allow: Allow) -> None:
        self._allow = allow
        self._blocks: dict[Block, BlockHandlers] = {}

    @property
    def first(self) -> Block:
        """The first block that is served; that of stage 0 before there is one. The guard lets a call through that is
        allowed there."""
        return min(self._blocks, default=Block(0))

    def add(self, block: Block, handlers: BlockHandlers) -> None:
        self._blocks[block] = handlers

    def remove(self, block: Block) -> None:
        del self._blocks[block]

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call, which gRPC asks for when the call comes in; None if no block has such a call."""
        usual = next((one for own in self._blocks.values() if (one := own.find(details)) is not None), None)
        if usual is None:
            return None
        is_generator, method = isasyncgenfunction(_behaviour(usual)), details.method
        streams = usual.request_streaming

        async def opened(request: Any, context: Any) -> tuple[Any, Any, Any]:
            """The behaviour that answers, and its two arguments."""
            address = _address_in_one(request)
            if streams:
                reading = anext(aiter(request), None) if is_generator else context.read()
                first = await in_time(reading, FIRST_SECONDS)
                address = _address_in(method, first)
                request, context = _again(first, request), _Again(context, first)
            block = self.first if address is None else Block(address.stage, address.variant)
            # Looked up only now: gRPC keeps what it was given for a call after the call has ended, and the memory of a
            # block that is given up is to be free.
            found = {block: one for block, own in self._blocks.items() if (one := own.find(details)) is not None}
            if not found:
                raise NotReady("this peer has left")
            if block in found and block != self.first:
                self._allow(method, block.stage, context)
            answering = block if block in found else min(found)
            ABOUT.set(self._blocks[answering].prefix)
            return _behaviour(found[answering]), request, context

        async def coroutine(request: Any, context: Any) -> Any:
            behaviour, *arguments = await opened(request, context)
            return await behaviour(*arguments)

        async def generator(request: Any, context: Any) -> AsyncIterator[Any]:
            behaviour, *arguments = await opened(request, context)
            async with aclosing(behaviour(*arguments)) as replies:
                async for reply in replies:
                    yield reply

        make = _MAKERS[usual.request_streaming, usual.response_streaming]
        answering = refusing(generator if is_generator else coroutine)
        return make(answering, usual.request_deserializer, usual.response_serializer)


class _Again:
    """A call's context of which the first message was read already, and is read once more."""

    def __init__(self, context: Any, first: Any) -> None:
        self._context = context
        self._unread = [first]
        self.write = context.write

    async def read(self) -> Any:
        return self._unread.pop() if self._unread else await self._context.read()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


async def _again(first: Any, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    if first is not None:
        yield first
        async for request in requests:
            yield request


def _behaviour(handler: Any) -> Any:
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def _address_in_one(request: Any) -> Any:
    """What in a request names the block, by its stage and variant; None where the request is for any block."""
    if isinstance(request, pb.DescribeRequest):
        return request if request.HasField("stage") else None
    return getattr(request, "address", None)


def _address_in(method: str, first: Any) -> Any:
    """The address in the first message of a stream; None where there is none, or the message cannot be read."""
    if isinstance(first, bytes) and method in _BARE:
        try:
            first, _ = parsed(_BARE[method], first)
        except MalformedMessage:
            return None
    return getattr(getattr(first, "open", None), "address", None)
