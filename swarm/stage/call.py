"""One call to a stage: its messages, read with deadlines and a bound on the bytes, and signs of life to its caller."""

import asyncio
from collections.abc import Mapping
from typing import Any

import torch
from google.protobuf.message import Message

from swarm.errors import DeadlineExceeded, MalformedMessage
from swarm.hop.answers import HopListener
from swarm.rpc.callers import MAX_KEPT_BYTES, Caller, Callers
from swarm.rpc.dispatch import FIRST_SECONDS
from swarm.rpc.serving import MESSAGE_SECONDS, Context, receive, send
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.wire import NewBytes, Piece, TensorReader, TensorSpec, new_bytes, parsed
from swarm.stage.admission import LARGEST_NUM_SLOTS

SLOWEST_BYTES_PER_SECOND = 32 << 10
"""A caller that sends tensors more slowly than this, beyond the wait for a message, is cut off: it may hold a slot."""
PROGRESS_SECONDS = 1.0
"""Time between two signs of life to the caller."""
DRAIN_SECONDS = 5.0
"""Longest wait for a refused caller to finish sending, beyond the time for its whole request at the slowest rate."""


def max_kept_bytes(specs: Mapping[str, TensorSpec], max_in_flight: int) -> int:
    """The most bytes that are kept of one caller's microbatches: enough that only slots limit an honest caller.

    A request is kept until it is acknowledged, but its slot is free once it is answered. So beside the requests that
    have a slot here there are answered ones: as many as may still have slots at earlier stages, on their way back.
    """
    return max(MAX_KEPT_BYTES, (max_in_flight + LARGEST_NUM_SLOTS) * _num_bytes(specs))


def _num_bytes(specs: Mapping[str, TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs.values())


class Incoming:
    """Reads one request's messages, which are of this kind. `memory` makes the memory of the tensors."""

    def __init__(
        self, kind: type[Message], context: Context, caller: Caller, callers: Callers, memory: NewBytes = new_bytes
    ) -> None:
        self._kind = kind
        self._memory = memory
        self._context = context
        self.caller = caller
        self._callers = callers
        self._reader: TensorReader | None = None
        self._expected_bytes = 0
        """The announced bytes that are still to come; negative when more has come."""
        self._kept_bytes = 0
        self._training = False
        self._first: list[Piece] = []
        """The pieces in the first message, while they are not read."""
        self._due = 0.0
        """When everything expected has to be here, at the slowest rate, by the loop's clock."""

    async def read(self, seconds: float = MESSAGE_SECONDS) -> tuple[Any, list[Piece]]:
        """The next message without its chunks, or None at the end of the stream; and its chunks. Raises
        MalformedMessage, DeadlineExceeded."""
        if (data := await receive(self._context, seconds)) is None:
            self._expected_bytes = 0
            return None, []
        message, pieces = parsed(self._kind, data)
        self._expected_bytes -= sum(piece.nbytes for _, piece in pieces)
        return message, pieces

    async def opening(self) -> Any:
        """The opening in the first message; None if it has none. Raises MalformedMessage, DeadlineExceeded."""
        message, self._first = await self.read(FIRST_SECONDS)
        return message.open if message is not None and message.HasField("open") else None

    def expect(self, specs: Mapping[str, TensorSpec], *, training: bool) -> None:
        """Note that the caller has begun to send these tensors. Raises Overloaded if too much is kept for it already.

        With `training` they are a microbatch's, whose number slots limit.
        """
        if self._reader is None:
            num_bytes = _num_bytes(specs)
            self._reader = TensorReader(specs, self._memory)
            self._expected_bytes += num_bytes
            self._due = asyncio.get_running_loop().time() + num_bytes / SLOWEST_BYTES_PER_SECOND
            self._callers.keep(self.caller, num_bytes, training=training)
            self._kept_bytes, self._training = num_bytes, training

    async def tensors(self) -> dict[str, torch.Tensor]:
        """The expected tensors, once they are whole. Raises MalformedMessage, DeadlineExceeded."""
        assert self._reader is not None
        seconds = MESSAGE_SECONDS + self._kept_bytes / SLOWEST_BYTES_PER_SECOND
        pieces, self._first = self._first, []
        try:
            async with asyncio.timeout(seconds):
                while True:
                    for piece in pieces:
                        self._reader.feed(piece)
                    if self._reader.complete:
                        return self._reader.tensors
                    message, pieces = await self.read()
                    if message is None:
                        raise MalformedMessage("the request ended before its tensors")
                    if not pieces:
                        raise MalformedMessage("a tensor chunk is expected")
        except TimeoutError:
            raise DeadlineExceeded(f"the tensors were not whole after {seconds:.0f} s") from None

    async def drain(self) -> None:
        """Read and drop what the caller is still sending.

        If a call ends while its caller still writes, the caller gets an internal error of gRPC and not the answer. So
        it would take a busy peer for a broken one.
        """
        self.close()
        self._first = []
        if self._reader is not None:
            self._reader.clear()
            self._reader = None
        try:
            async with asyncio.timeout_at(max(self._due, asyncio.get_running_loop().time()) + DRAIN_SECONDS):
                while self._expected_bytes > 0:
                    await self.read()
        except (TimeoutError, DeadlineExceeded, MalformedMessage):
            pass

    def close(self) -> None:
        """Note that the call has ended, and nothing is kept for it any more."""
        self._callers.release(self.caller, self._kept_bytes, training=self._training)
        self._kept_bytes = 0


async def with_progress(
    context: Context, work: "asyncio.Future[Any]", awaited: HopListener,
    reply: type[pb.TrainReply | pb.EvaluateReply | pb.HoldReply],
) -> Any:  # fmt: skip
    """Wait for the result of `work`, and send what is awaited again and again, because the caller would take a silent
    peer for dead. An error or cancellation cancels the work."""
    try:
        while not (await asyncio.wait([work], timeout=PROGRESS_SECONDS))[0]:
            await send(context, reply(progress=awaited.message))
    finally:
        work.cancel()
    return work.result()
