import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.averaging.vectors.snapshots import TensorBytes, allocate, describe
from swarm.errors import MalformedMessage
from swarm.rpc.v1.tensor_pb2 import TensorHeader

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5)


@settings(max_examples=50)
@given(shapes=SHAPES, data=st.data())
def test_bytes_written_in_any_order_give_the_same_tensors(shapes: list[list[int]], data: st.DataObject) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
    tensors = {
        f"t{i}": torch.randint(-99, 99, shape).to(data.draw(st.sampled_from(dtypes))) for i, shape in enumerate(shapes)
    }
    source = TensorBytes(tensors.values())
    copies = allocate(describe(tensors), source.num_bytes + 64)
    target = TensorBytes(copies.values())
    step = data.draw(st.integers(1, 7))
    for start in data.draw(st.permutations(range(0, source.num_bytes, step))):
        target.write(start, b"".join(source.pieces(start, min(source.num_bytes, start + step))))
    assert all(torch.equal(tensors[name], copies[name]) for name in tensors)
    whole = b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors.values())
    assert target.sha256(0, target.num_bytes) == hashlib.sha256(whole).digest()


def test_pieces_are_of_the_size_of_a_message() -> None:
    pieces = list(TensorBytes([torch.zeros(5 << 18), torch.ones(3)]).pieces(0, (5 << 20) + 12))
    assert [len(piece) for piece in pieces] == [1 << 20] * 5 + [12]


def header(*shape: int, name: str = "a", encoding: str = "fp32", num_bytes: int = 0) -> TensorHeader:
    return TensorHeader(name=name, encoding=encoding, shape=shape, num_bytes=num_bytes)


@pytest.mark.parametrize(
    "headers",
    [
        [header(8, num_bytes=32, encoding="pickle")],
        [header(8, num_bytes=32), header(8, num_bytes=32)],
        [header(8, num_bytes=31)],
        [header(200, num_bytes=800), header(200, num_bytes=800, name="b")],
        [header(1 << 62, num_bytes=1 << 63)],
        [header(0, 1 << 62, num_bytes=0)],
        [header(*[1] * 1000, num_bytes=4)],
    ],
    ids=["type", "twice", "size", "too much", "huge", "hidden", "dimensions"],
)
def test_hostile_descriptions_are_refused(headers: list[TensorHeader]) -> None:
    with pytest.raises(MalformedMessage):
        allocate(headers, 1000)
