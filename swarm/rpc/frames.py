"""Messages that carry tensors, read and written without protobuf's copies.

The bytes are those that protobuf would write (docs/protocol.md), so this is no other protocol. protobuf itself would
copy each tensor three times on its way out, and three times on its way in. Here a piece of a tensor is copied once,
into the message; the reader gets a view into the message that has come.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import grpc
import torch
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from swarm.errors import MalformedMessage
from swarm.rpc.bounds import require_bounds
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceServicer, StageServiceStub
from swarm.rpc.v1.tensor_pb2 import TensorChunk, TensorHeader
from swarm.rpc.wire import CHUNK_BYTES, NAMES, Piece

MOST_FIELDS = 64
"""The most fields in a message or in a chunk of it; an honest one has a few, since a message is sent once it has
CHUNK_BYTES of tensors. Each takes microseconds to look at, and the event loop waits meanwhile."""

_SERVICE = "swarm.rpc.v1.StageService"
_HEADER, _DATA = (TensorChunk.DESCRIPTOR.fields_by_name[name].number for name in ("header", "data"))
_WITH_LENGTH = 2
"""protobuf's type of a field whose bytes follow its length. All fields in messages with chunks are of this type."""

_Message = TypeVar("_Message", bound=Message)


@dataclass(eq=False)
class Frame:
    """A message to be sent, in parts that are put together only when it is."""

    parts: list[bytes | memoryview] = field(default_factory=list)
    num_tensor_bytes: int = 0

    def add(self, message: Message) -> None:
        self.parts.append(message.SerializeToString())

    def add_piece(self, chunks: int, header: TensorHeader | None, data: memoryview) -> None:
        """Add a chunk. Its bytes may not change until the message is sent.

        Args:
            chunks: the number of the message's field with the chunks.
        """
        start = TensorChunk(header=header).SerializeToString() + _key(_DATA, len(data))
        self.parts += _key(chunks, len(start) + len(data)), start, data
        self.num_tensor_bytes += len(data)


def frames(first: Message, tensors: Mapping[str, torch.Tensor]) -> Iterator[Frame]:
    """Yield messages that carry CPU tensors, of types in ENCODINGS, as chunks; the first has the fields of `first`.

    There is at least one message, and each but the last has CHUNK_BYTES or more.
    """
    frame, chunks = Frame(), _chunks(first.DESCRIPTOR)
    frame.add(first)
    for name, tensor in tensors.items():
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        header = TensorHeader(name=name, encoding=NAMES[tensor.dtype], shape=tuple(tensor.shape), num_bytes=raw.nbytes)
        for start in range(0, max(1, raw.nbytes), CHUNK_BYTES):
            if frame.num_tensor_bytes >= CHUNK_BYTES:
                yield frame
                frame = Frame()
            frame.add_piece(chunks, header if start == 0 else None, raw[start : start + CHUNK_BYTES])
    yield frame


def serialized(message: Frame | Message) -> bytes:
    return b"".join(message.parts) if isinstance(message, Frame) else message.SerializeToString()


def parsed(kind: type[_Message], data: bytes) -> tuple[_Message, list[Piece]]:
    """Read a message without its chunks, and its chunks.

    Raises:
        MalformedMessage: it is no message of this kind, or its numbers or lists are out of bounds.
    """
    chunks, others, pieces = _chunks(kind.DESCRIPTOR), list[memoryview](), list[Piece]()
    for number, whole, content in _fields(memoryview(data)):
        if number == chunks:
            pieces.append(_piece(content))
        else:
            others.append(whole)
    return _bounded(kind, b"".join(others)), pieces


def _piece(chunk: memoryview) -> Piece:
    header, data = None, memoryview(b"")
    for number, _, content in _fields(chunk):
        if number == _HEADER:
            header = _bounded(TensorHeader, bytes(content))
        elif number == _DATA:
            data = content
    return header, data


def _bounded(kind: type[_Message], data: bytes) -> _Message:
    try:
        message = kind.FromString(data)
    except DecodeError:
        raise MalformedMessage("that is no message of this call") from None
    require_bounds(message, finite=True)
    return message


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
    """For each field: its number, all of it, and its content. Raises MalformedMessage."""
    end = num_fields = 0
    while end < len(data):
        num_fields += 1
        key, start = _number(data, begin := end)
        length, start = _number(data, start)
        end = start + length
        if num_fields > MOST_FIELDS or key & 7 != _WITH_LENGTH or end > len(data):
            raise MalformedMessage("that is no message of this call")
        yield key >> 3, data[begin:end], data[start:end]


def _number(data: memoryview, start: int) -> tuple[int, int]:
    """protobuf's number at this place, below 2^28, and the place behind it. Raises MalformedMessage."""
    number = 0
    for place, byte in enumerate(data[start : start + 4]):
        number |= (byte & 127) << 7 * place
        if byte < 128:
            return number, start + place + 1
    raise MalformedMessage("that is no message of this call")


def _key(field_number: int, length: int) -> bytes:
    """What stands before the content of a field."""
    key, numbers = bytearray(), (field_number << 3 | _WITH_LENGTH, length)
    for number in numbers:
        while number >= 128:
            key.append(number & 127 | 128)
            number >>= 7
        key.append(number)
    return bytes(key)


@cache
def _chunks(kind: Descriptor) -> int:
    """The number of the field with the chunks; 0 if there is none."""
    found = kind.fields_by_name.get("chunks")
    return 0 if found is None else found.number


# -- the two ends of a call --------------------------------------------------------------------------------------------


def stage_stub(channel: grpc.aio.Channel) -> Any:
    """A StageServiceStub whose Train and Evaluate take Frames as well, and whose Train gives bytes."""
    stub: Any = StageServiceStub(channel)
    stub.Train = channel.stream_stream(f"/{_SERVICE}/Train", request_serializer=serialized)
    stub.Evaluate = channel.stream_stream(
        f"/{_SERVICE}/Evaluate", request_serializer=serialized, response_deserializer=pb.EvaluateReply.FromString
    )
    return stub


def add_stage_servicer(servicer: StageServiceServicer, server: grpc.aio.Server) -> None:
    """Serve a stage. Its Train and Evaluate get bytes, and Train may send Frames."""
    handlers: dict[str, Any] = {
        "Train": grpc.stream_stream_rpc_method_handler(servicer.Train, response_serializer=serialized),
        "Evaluate": grpc.stream_stream_rpc_method_handler(servicer.Evaluate, response_serializer=serialized),
        "Hold": grpc.unary_stream_rpc_method_handler(
            servicer.Hold, pb.HoldRequest.FromString, pb.HoldReply.SerializeToString
        ),
        "Describe": grpc.unary_unary_rpc_method_handler(
            servicer.Describe, pb.DescribeRequest.FromString, pb.DescribeReply.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
