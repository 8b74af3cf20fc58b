"""Frames are protobuf's own bytes, and whatever protobuf or a stranger writes is read within bounds or refused."""

from typing import Any

import pytest
import torch

from swarm.errors import MalformedMessage
from swarm.rpc.frames import MOST_FIELDS, frames, parsed, serialized
from swarm.rpc.v1.stage_pb2 import Done, EvaluateOpen, EvaluateReply, EvaluateRequest, Open, TrainReply, TrainRequest
from swarm.rpc.v1.tensor_pb2 import TensorChunk, TensorHeader
from swarm.types import LARGEST_COUNT

_HEADER = TensorHeader(name="hidden", encoding="int32", shape=(300,), num_bytes=1200)
_DATA = torch.arange(300, dtype=torch.int32)
_CHUNK = TensorChunk(header=_HEADER, data=_DATA.numpy().tobytes())
_MESSAGES = [
    TrainRequest(open=Open(microbatch=7, eager=True), chunks=[_CHUNK]),
    EvaluateRequest(open=EvaluateOpen(round=3), chunks=[_CHUNK]),
    TrainReply(done=Done(loss=2.5), chunks=[_CHUNK]),
]


def _without_chunks(
    message: Any,
) -> Any:
    rest = type(message).FromString(message.SerializeToString())
    rest.ClearField("chunks")
    return rest


@pytest.mark.parametrize("message", _MESSAGES)
def test_a_frame_is_what_protobuf_would_write(message: Any) -> None:
    [frame] = frames(_without_chunks(message), {"hidden": _DATA})
    assert type(message).FromString(serialized(frame)) == message


@pytest.mark.parametrize("message", _MESSAGES)
def test_what_protobuf_writes_is_read_without_copies(message: Any) -> None:
    data = message.SerializeToString()
    rest, [(header, piece)] = parsed(type(message), data)
    assert rest == _without_chunks(message)
    assert header == _HEADER
    assert piece == _CHUNK.data
    assert piece.obj is data


def test_fields_may_be_added_to_the_last_frame_of_a_tensor() -> None:
    [frame] = frames(TrainReply(), {"hidden": _DATA})
    frame.add(TrainReply(done=Done(loss=2.5)))
    assert TrainReply.FromString(serialized(frame)) == _MESSAGES[2]


def test_a_message_without_chunks_is_only_read() -> None:
    assert parsed(EvaluateReply, b"") == (EvaluateReply(), [])
    assert parsed(TrainRequest, b"") == (TrainRequest(), [])


_WHOLE = TrainRequest(chunks=[_CHUNK]).SerializeToString()


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
