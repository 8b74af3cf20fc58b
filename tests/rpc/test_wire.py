"""Tensors arrive bit for bit as they were sent, in protobuf's own bytes, and nothing else is let in."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from swarm.errors import MalformedMessage
from swarm.rpc.bounds import CHUNK_BYTES
from swarm.rpc.v1.stage_pb2 import (
    Ack,
    Done,
    EvaluateOpen,
    EvaluateRequest,
    Open,
    TrainReply,
    TrainRequest,
)
from swarm.rpc.v1.tensor_pb2 import TensorChunk, TensorHeader
from swarm.rpc.wire import (
    DTYPES,
    MOST_FIELDS,
    Piece,
    TensorReader,
    TensorSpec,
    frames,
    parsed,
    require_in_range,
    serialized,
)
from swarm.types import LARGEST_COUNT
from tests.support.chunks import chunks

_SPEC = TensorSpec(shape=(2, 3), encoding="fp32")
_HEADER = TensorHeader(name="hidden", encoding="fp32", shape=(2, 3), num_bytes=24)
_FRAMED = TensorHeader(name="hidden", encoding="int32", shape=(300,), num_bytes=1200)
_FRAME_DATA = torch.arange(300, dtype=torch.int32)
_CHUNK = TensorChunk(header=_FRAMED, data=_FRAME_DATA.numpy().tobytes())
_MESSAGES = [
    TrainRequest(open=Open(microbatch=7, eager=True), chunks=[_CHUNK]),
    EvaluateRequest(open=EvaluateOpen(round=3), chunks=[_CHUNK]),
    TrainReply(done=Done(loss=2.5), chunks=[_CHUNK]),
]
_WHOLE = TrainRequest(chunks=[_CHUNK]).SerializeToString()


def _feed(reader: TensorReader, messages: Iterable[TensorChunk]) -> None:
    for message in messages:
        reader.feed(_piece(message))


def _piece(chunk: TensorChunk) -> Piece:
    [piece] = parsed(TrainRequest, TrainRequest(chunks=[chunk]).SerializeToString())[1]
    return piece


def _read(messages: Iterable[TensorChunk], **expected: TensorSpec) -> dict[str, torch.Tensor]:
    reader = TensorReader(expected)
    _feed(reader, messages)
    assert reader.complete
    return reader.tensors


@pytest.mark.parametrize(("encoding", "dtype"), DTYPES.items())
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 4), (CHUNK_BYTES // 4 + 7,)])
def test_round_trip_is_exact(encoding: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1000).to(dtype)
    received = _read(chunks("x", tensor), x=TensorSpec(shape=shape, encoding=encoding))["x"]
    assert received.dtype == dtype
    assert torch.equal(received, tensor)


def test_a_message_takes_what_fits_and_is_bounded() -> None:
    """Small tensors come together; a large one goes on in the next message."""
    small, large = torch.zeros(4), torch.zeros(CHUNK_BYTES // 4 * 2 + 1)
    first, encodings = TrainRequest(ack=Ack()), dict.fromkeys(("first", "second", "third"), "fp32")
    sent = frames(first, {"first": small, "second": small, "third": large}, encodings)
    messages = [TrainRequest.FromString(serialized(frame)) for frame in sent]
    sizes = [[len(chunk.data) for chunk in message.chunks] for message in messages]
    assert sizes == [[16, 16, CHUNK_BYTES], [CHUNK_BYTES], [4]]
    assert [message.HasField("ack") for message in messages] == [True, False, False]
    assert [serialized(frame) for frame in frames(first, {}, {})] == [first.SerializeToString()], "there is always one"


def test_a_tensor_arrives_in_the_memory_that_is_made_for_it() -> None:
    """On a machine with a GPU this is memory from which the GPU copies by itself."""
    made = []

    def memory(num_bytes: int) -> torch.Tensor:
        made.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        return made[-1]

    reader = TensorReader({"hidden": _SPEC}, memory)
    _feed(reader, chunks("hidden", torch.ones(2, 3)))
    [only] = made
    assert reader.tensors["hidden"].data_ptr() == only.data_ptr()
    reader.tensors["hidden"].add_(1)  # It can be written to.
    assert torch.equal(reader.tensors["hidden"], torch.full((2, 3), 2.0))


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([TensorChunk(data=b"1234")], "before its header"),
        ([*chunks("other", torch.zeros(2, 3))], "not expected"),
        ([*chunks("hidden", torch.zeros(3, 2))], r"\[3, 2\], expected"),
        ([*chunks("hidden", torch.zeros(2, 3, dtype=torch.bfloat16))], "'bf16'"),
        ([TensorChunk(header=TensorHeader(name="hidden", encoding="fp32", shape=(2, 3), num_bytes=2**60))], "bytes"),
        ([TensorChunk(header=_HEADER, data=bytes(25))], "longer than its header says"),
        ([TensorChunk(header=_HEADER, data=bytes(8)), TensorChunk(header=_HEADER)], "before 'hidden' is complete"),
        ([*chunks("hidden", torch.zeros(2, 3)), *chunks("hidden", torch.zeros(2, 3))], "not expected"),
        ([*chunks("hidden", torch.zeros(2, 3)), TensorChunk(data=b"1234")], "before its header"),
        # Each would cost the reader work, and their number has no bound.
        ([TensorChunk(header=_HEADER)], "an empty chunk of tensor 'hidden'"),
    ],
)
def test_what_breaks_the_protocol_is_refused(messages: list[TensorChunk], fault: str) -> None:
    with pytest.raises(MalformedMessage, match=fault):
        _feed(TensorReader({"hidden": _SPEC}), messages)


def test_error_messages_quote_little_of_what_a_stranger_sent() -> None:
    reader = TensorReader({"hidden": _SPEC})
    header = TensorHeader(name="hidden", encoding="e" * 10_000, shape=[1] * 10_000)
    with pytest.raises(MalformedMessage) as refusal:
        reader.feed(_piece(TensorChunk(header=header)))
    assert len(str(refusal.value)) < 300


def _fp16(exponent: int, *numbers: float) -> torch.Tensor:
    """Encode as docs/protocol.md says: the numbers have to be multiplied by 2^(exponent - 141)."""
    return torch.tensor([exponent, *numbers], dtype=torch.float16)


def _int8(*scales: float, code: int = 1) -> torch.Tensor:
    """Encode blocks as docs/protocol.md says: the scales, then 128 codes for each."""
    codes = torch.full((128 * len(scales),), code, dtype=torch.int8)
    return torch.cat([torch.tensor(scales, dtype=torch.bfloat16).view(torch.uint8), codes.view(torch.uint8)])


def test_whatever_can_be_carried_is_accepted() -> None:
    require_in_range("hidden", torch.tensor([65_504.0, -65_504.0]), "fp32")
    require_in_range("hidden", _fp16(142, 32_752.0, -32_752.0), "fp16")
    require_in_range("hidden", torch.full((8,), 60_000.0, dtype=torch.bfloat16), "bf16")
    require_in_range("hidden", torch.empty(0), "fp32")
    require_in_range("hidden", _int8(0.0, 512.0, 1e-30, code=-127), "int8")


OUT_OF_RANGE = "'hidden' holds NaN, infinity, or numbers beyond 65504"


@pytest.mark.parametrize(
    ("tensor", "fault"),
    [
        *((torch.tensor([0.0, bad]), OUT_OF_RANGE) for bad in (math.nan, math.inf, -math.inf, 1e30, -1e30, 65_505.0)),
        (torch.tensor([math.inf, -math.inf]), OUT_OF_RANGE),
        # Scaled numbers are judged by what they mean, and blocks by their scales.
        (_fp16(142, 0.0, 32_768.0), OUT_OF_RANGE),
        (_fp16(143, -16_400.0), OUT_OF_RANGE),
        (_fp16(254, 1.0), OUT_OF_RANGE),
        (_fp16(15, math.nan), OUT_OF_RANGE),
        (_int8(1.0, 516.0), OUT_OF_RANGE),
        (_int8(math.nan, 1.0), "a scale of int8 is not a number"),
        (_int8(1.0, math.inf), "a scale of int8 is not a number"),
        (_int8(1.0, -1.0), "a scale of int8 is not a number"),
        (_int8(1.0, 1.0, code=-128), "int8 holds the code -128"),
    ],
)
def test_numbers_that_nobody_sends_are_refused(tensor: torch.Tensor, fault: str) -> None:
    with pytest.raises(MalformedMessage, match=fault):
        require_in_range("hidden", tensor, {each: name for name, each in DTYPES.items()}[tensor.dtype])


def _without_chunks(message: Any) -> Any:
    rest = type(message).FromString(message.SerializeToString())
    rest.ClearField("chunks")
    return rest


@pytest.mark.parametrize("message", _MESSAGES)
def test_a_frame_is_what_protobuf_would_write_and_is_read_without_copies(message: Any) -> None:
    [frame] = frames(_without_chunks(message), {"hidden": _FRAME_DATA}, {})
    assert type(message).FromString(serialized(frame)) == message
    data = message.SerializeToString()
    rest, [(header, piece)] = parsed(type(message), data)
    assert rest == _without_chunks(message)
    assert header == _FRAMED
    assert isinstance(piece, memoryview)
    assert bytes(piece) == _CHUNK.data
    assert piece.obj is data


def test_within_a_process_whole_tensors_are_passed_on_as_they_are_and_checked_as_others_are() -> None:
    strided = torch.arange(24, dtype=torch.int32).reshape(4, 6).T
    [frame] = frames(TrainReply(done=Done(loss=2.5)), {"hidden": _FRAME_DATA, "tokens": strided}, {}, whole=True)
    message, pieces = parsed(TrainReply, frame)
    assert message.done.loss == 2.5
    specs = {
        name: TensorSpec(shape=tuple(tensor.shape), encoding=encoding)
        for name, tensor, encoding in (("hidden", _FRAME_DATA, "int32"), ("tokens", strided, "int32"))
    }
    reader = TensorReader(specs, memory=_no_memory)
    for piece in pieces:
        reader.feed(piece)
    assert reader.complete
    assert reader.tensors["hidden"].data_ptr() == _FRAME_DATA.data_ptr()
    assert torch.equal(reader.tensors["tokens"], strided)
    with pytest.raises(MalformedMessage, match="is not expected here"):
        TensorReader({"hidden": specs["hidden"]}).feed(pieces[1])
    with pytest.raises(MalformedMessage, match=r"expected .int32. \[300\]"):
        TensorReader({"tokens": specs["hidden"]}).feed(pieces[1])
    with pytest.raises(MalformedMessage, match="no message of this call"):
        parsed(TrainRequest, frame)


def _no_memory(num_bytes: int) -> torch.Tensor:
    raise AssertionError(f"{num_bytes} bytes are copied")


@pytest.mark.parametrize(
    "data",
    [
        *(_WHOLE[:length] for length in (1, 2, 3, 4, 20, len(_WHOLE) - 1)),
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x12\x80\x80\x80\x80\x80",
        b"\x10\x01",
        b"\x13\x14",
        b"\x12\x04\x12\x09ab",
        b"\x12\x03\x10\x01\x01",
        b"\x12\x04\x0a\x02\xff\xff",
        b"\x0a\x02\xff\xff",
        b"\x1a\x00" * (MOST_FIELDS + 1),
        b"\x12\x00" * (MOST_FIELDS + 1),
        b"\x12\x82\x01" + b"\x12\x00" * (MOST_FIELDS + 1),
        TrainRequest(chunks=[TensorChunk(header=TensorHeader(num_bytes=LARGEST_COUNT + 1))]).SerializeToString(),
        TrainRequest(open=Open(way_seconds=float("nan"))).SerializeToString(),
    ],
)
def test_malformed_messages_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        parsed(TrainRequest, data)
