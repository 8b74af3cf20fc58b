"""Tensors on the wire: the messages that carry them, what a receiver expects, and how it puts them together again.

The bytes are protobuf's (docs/protocol.md), read and written without its three copies each way: a piece of a tensor is
copied once into its message, and the reader gets a view into what has come. Within one process (local.py) there are no
bytes: a tensor is one piece, which the receiver uses as it is.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import grpc
import torch
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from swarm.compression import activations
from swarm.errors import MalformedMessage
from swarm.machine.tensor_file import bytes_of
from swarm.rpc.bounds import CHUNK_BYTES, require_bounds
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceServicer, StageServiceStub
from swarm.rpc.v1.tensor_pb2 import TensorChunk, TensorHeader

LARGEST_ACTIVATION = 65504.0
"""Largest magnitude of an activation or its gradient: float16's largest number, whatever the element type. Beyond it,
training has diverged or a peer wants to make it diverge: products of such numbers overflow float32."""

HIDDEN, GRADIENT = "hidden", "hidden_gradient"
"""What a stage gets from the one before it, and the gradient of that, which it answers, in the same encoding."""
DTYPES = {"int32": torch.int32} | {name: each.dtype for name, each in activations.ENCODINGS.items()}
"""The types of the tensors that may travel between stages, by their encodings: tokens, and activations."""
MOST_FIELDS = 64
"""The most fields in a message or in a chunk of it; an honest one has a few, since a message is sent once it has
CHUNK_BYTES of tensors. Each takes microseconds to look at, and the event loop waits meanwhile."""
_SERVICE = "swarm.rpc.v1.StageService"
_HEADER, _DATA = (TensorChunk.DESCRIPTOR.fields_by_name[name].number for name in ("header", "data"))
_WITH_LENGTH = 2
"""protobuf's type of a field whose bytes follow its length. All fields in messages with chunks are of this type."""

Piece = tuple[TensorHeader | None, memoryview | torch.Tensor]
"""A piece of a tensor, with the header if it is the first one; or, from this very process, a whole tensor."""
NewBytes = Callable[[int], torch.Tensor]
"""Makes memory for this many bytes, whatever they are: a tensor of uint8 on the CPU."""
_Message = TypeVar("_Message", bound=Message)


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a receiver expects under one name."""

    shape: tuple[int, ...]
    encoding: str

    @property
    def num_bytes(self) -> int:
        num_bytes = DTYPES[self.encoding].itemsize
        for extent in self.shape:
            num_bytes *= extent
        return num_bytes


def new_bytes(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


class TensorReader:
    """Assembles the expected tensors from the chunks of one stream."""

    def __init__(self, expected: Mapping[str, TensorSpec], memory: NewBytes = new_bytes) -> None:
        """`memory` makes the memory of each tensor."""
        self.expected = expected
        self._missing = dict(expected)
        self._memory = memory
        self._bytes = new_bytes(0)
        self._buffer = memoryview(b"")
        self._current: TensorSpec | None = None
        self._name = ""
        self._filled = 0
        self.tensors: dict[str, torch.Tensor] = {}

    @property
    def complete(self) -> bool:
        return not self._missing and self._current is None

    def clear(self) -> None:
        """Let go of all bytes that nobody has taken: the traceback of an error that `feed` raised may keep this reader
        alive."""
        self._bytes, self._buffer, self.tensors = new_bytes(0), memoryview(b""), {}

    def feed(self, piece: Piece) -> None:
        """Take the next piece, which is copied unless it is a whole tensor. Raises MalformedMessage if the piece is
        empty, or has an unexpected or repeated name, or another shape, encoding or size than expected."""
        header, data = piece
        if header is not None:
            spec = self._begin(header)
            if isinstance(data, torch.Tensor):
                self._finish(data)
                return
            # Not cleared: a tensor is given out once all of its bytes have come.
            self._bytes = self._memory(spec.num_bytes)
            self._buffer = self._bytes.numpy().data
        if self._current is None or isinstance(data, torch.Tensor):
            raise MalformedMessage("a tensor chunk came before its header")
        if self._buffer and not data:
            raise MalformedMessage(f"an empty chunk of tensor {self._name!r}")
        end = self._filled + len(data)
        if end > len(self._buffer):
            raise MalformedMessage(f"tensor {self._name!r} is longer than its header says")
        self._buffer[self._filled : end] = data
        self._filled = end
        if end == len(self._buffer):
            self._finish(self._bytes.view(DTYPES[self._current.encoding]).reshape(self._current.shape))

    def _begin(self, header: TensorHeader) -> TensorSpec:
        if self._current is not None:
            raise MalformedMessage(f"tensor {header.name!r} begins before {self._name!r} is complete")
        spec = self._missing.pop(header.name, None)
        if spec is None:
            raise MalformedMessage(f"tensor {header.name[:64]!r} is not expected here")
        if tuple(header.shape) != spec.shape or header.encoding != spec.encoding:
            raise MalformedMessage(
                f"tensor {header.name!r} is {header.encoding[:16]!r} {list(header.shape)[:8]}, "
                f"expected {spec.encoding!r} {list(spec.shape)}"
            )
        if header.num_bytes != spec.num_bytes:
            raise MalformedMessage(f"tensor {header.name!r} has {header.num_bytes} bytes, expected {spec.num_bytes}")
        self._name, self._current, self._filled = header.name, spec, 0
        return spec

    def _finish(self, tensor: torch.Tensor) -> None:
        self.tensors[self._name], self._current = tensor, None


def require_in_range(name: str, tensor: torch.Tensor, encoding: str) -> None:
    """Raise MalformedMessage for NaN, infinity, numbers beyond LARGEST_ACTIVATION, or bytes that no codec made."""
    # NaN fails the comparison.
    if tensor.numel() and not activations.ENCODINGS[encoding].largest(tensor) <= LARGEST_ACTIVATION:
        raise MalformedMessage(f"tensor {name!r} holds NaN, infinity, or numbers beyond {LARGEST_ACTIVATION:.0f}")


@dataclass(eq=False)
class Frame:
    """A message to be sent, and pieces of tensors in it, whose bytes may not change until it is sent."""

    message: Message
    pieces: list[Piece] = field(default_factory=list)

    @property
    def num_tensor_bytes(self) -> int:
        return sum(data.nbytes for _, data in self.pieces)


def frames(
    first: Message, tensors: Mapping[str, torch.Tensor], encodings: Mapping[str, str], *, whole: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[Frame]:  # fmt: skip
    """Yield messages that carry CPU tensors as chunks; the first has the fields of `first`. `encodings` are those of
    tensors by their names; all others are int32.

    There is at least one message, and each but the last has `chunk_bytes` or more. With `whole` there is one, and each
    tensor is one piece of it, as it is and on any device.
    """
    frame = Frame(first)
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        encoding = encodings.get(name, "int32")
        assert DTYPES[encoding] is tensor.dtype, f"{name} is no {encoding}"
        header = TensorHeader(name=name, encoding=encoding, shape=tuple(tensor.shape), num_bytes=tensor.nbytes)
        if whole:
            frame.pieces.append((header, tensor))
            continue
        raw = bytes_of(tensor)
        for start in range(0, max(1, raw.nbytes), chunk_bytes):
            if frame.num_tensor_bytes >= chunk_bytes:
                yield frame
                frame = Frame(type(first)())
            frame.pieces.append((header if start == 0 else None, raw[start : start + chunk_bytes]))
    yield frame


def serialized(message: Frame | Message) -> bytes:
    if not isinstance(message, Frame):
        return message.SerializeToString()
    parts: list[bytes | memoryview] = [message.message.SerializeToString()]
    for header, data in message.pieces:
        assert isinstance(data, memoryview), "whole tensors stay in this process"
        start = TensorChunk(header=header).SerializeToString() + _key(_DATA, data.nbytes)
        parts += _key(_chunks(message.message.DESCRIPTOR), len(start) + data.nbytes), start, data
    return b"".join(parts)


def parsed(kind: type[_Message], data: bytes | Frame | Message) -> tuple[_Message, list[Piece]]:
    """Read a message without its chunks, and its chunks. Raises MalformedMessage if it is no message of this kind, or
    its numbers or lists are out of bounds. What comes from this process was never written as bytes."""
    if not isinstance(data, bytes):
        frame = data if isinstance(data, Frame) else Frame(data)
        if not isinstance(frame.message, kind):
            raise MalformedMessage("that is no message of this call")
        return frame.message, frame.pieces
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


def stage_stub(channel: grpc.aio.Channel) -> Any:
    """A StageServiceStub whose Train and Evaluate take Frames as well, and whose Train and Show give bytes."""
    stub: Any = StageServiceStub(channel)
    stub.Train = channel.stream_stream(f"/{_SERVICE}/Train", request_serializer=serialized)
    stub.Evaluate = channel.stream_stream(
        f"/{_SERVICE}/Evaluate", request_serializer=serialized, response_deserializer=pb.EvaluateReply.FromString
    )
    stub.Show = channel.unary_stream(f"/{_SERVICE}/Show", request_serializer=pb.ShowRequest.SerializeToString)
    return stub


def add_stage_servicer(servicer: StageServiceServicer, server: grpc.aio.Server) -> None:
    """Serve a stage. Its Train and Evaluate get bytes, and Train and Show may send Frames."""
    handlers: dict[str, Any] = {
        "Train": grpc.stream_stream_rpc_method_handler(servicer.Train, response_serializer=serialized),
        "Evaluate": grpc.stream_stream_rpc_method_handler(servicer.Evaluate, response_serializer=serialized),
        "Hold": grpc.unary_stream_rpc_method_handler(
            servicer.Hold, pb.HoldRequest.FromString, pb.HoldReply.SerializeToString
        ),
        "Describe": grpc.unary_unary_rpc_method_handler(
            servicer.Describe, pb.DescribeRequest.FromString, pb.DescribeReply.SerializeToString
        ),
        "Show": grpc.unary_stream_rpc_method_handler(servicer.Show, pb.ShowRequest.FromString, serialized),
        "SpotCheck": grpc.unary_unary_rpc_method_handler(
            servicer.SpotCheck, pb.SpotCheckRequest.FromString, pb.SpotCheckReply.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
