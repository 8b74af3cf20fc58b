import math
import struct

import pytest
import torch

from swarm.compression.codec import Codec, simple_codec
from swarm.compression.quantize import Int4, Int8
from swarm.errors import MalformedMessage
from tests.compression.all_codecs import make_vector


def test_fp32_is_exact_to_the_sign_of_zero_and_shares_memory() -> None:
    vector_N = torch.tensor([-0.0, 1e-45, 3.4e38])
    encoded = simple_codec("fp32").encode(vector_N)
    decoded_N = simple_codec("fp32").decode(encoded, 3)
    assert torch.equal(decoded_N.view(torch.int32), vector_N.view(torch.int32))
    assert decoded_N.data_ptr() == vector_N.data_ptr()


@pytest.mark.parametrize(("name", "largest"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
def test_casts_clamp_what_they_cannot_hold(name: str, largest: float) -> None:
    codec = simple_codec(name)
    assert codec.decode(codec.encode(torch.tensor([3.4e38, -3.4e38])), 2).tolist() == [largest, -largest]


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=lambda codec: codec.name)
def test_no_element_is_off_by_more_than_half_a_step(codec: Codec) -> None:
    vector_N = make_vector(50 * codec.tile) * torch.logspace(-6, 6, 50).repeat_interleave(codec.tile)
    decoded_N = codec.decode(codec.encode(vector_N), vector_N.numel())
    largest = 127 if codec.name == "int8" else 7
    step_N = (vector_N.view(50, -1).abs().amax(1) / largest).repeat_interleave(codec.tile)
    # A scale is rounded to eight bits.
    assert bool(((decoded_N - vector_N).abs() <= step_N * (0.5 + largest / 512)).all())


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=lambda codec: codec.name)
def test_the_layout_is_the_documented_one(codec: Codec) -> None:
    num_elements = 2 * codec.tile + 7
    encoded = bytes(codec.encode(make_vector(num_elements)))
    assert codec.decode(encoded, num_elements).tolist() == _decode_in_python(codec, encoded)[:num_elements]


def _decode_in_python(codec: Codec, encoded: bytes) -> list[float]:
    """Three blocks, decoded one number at a time."""
    scales = [struct.unpack("<f", b"\0\0" + encoded[2 * i : 2 * i + 2])[0] for i in range(3)]
    codes: list[int]
    if codec.name == "int8":
        codes = list(struct.unpack(f"<{3 * 128}b", encoded[6:]))
    else:
        blocks = [encoded[6 + 32 * i : 38 + 32 * i] for i in range(3)]
        codes = [(byte >> shift & 15) - 8 for block in blocks for shift in (0, 4) for byte in block]
    exact = [code * scales[i // codec.tile] for i, code in enumerate(codes)]
    return [float(torch.tensor(number, dtype=torch.float32)) for number in exact]


@pytest.mark.parametrize(
    ("codec", "place", "byte"),
    [(Int8(), 2 + 5, 0x80), (Int4(), 2 + 5, 0xF0), (Int4(), 2 + 5, 0x0F)],
    ids=["int8", "int4-low", "int4-high"],
)
def test_the_code_without_a_counterpart_is_refused(codec: Codec, place: int, byte: int) -> None:
    encoded = bytearray(codec.encode(make_vector(codec.tile)))
    encoded[place] = byte
    with pytest.raises(MalformedMessage, match="holds the code -"):
        codec.decode(encoded, codec.tile)


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf, 2.0**101])
def test_scales_out_of_range_are_refused(codec: Codec, scale: float) -> None:
    encoded = bytearray(codec.encode(make_vector(3 * codec.tile)))
    encoded[2:4] = struct.pack("<f", scale)[2:]
    with pytest.raises(MalformedMessage, match=f"a scale of {codec.name} is not a number between 0"):
        codec.decode(encoded, 3 * codec.tile)


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=lambda codec: codec.name)
def test_what_is_too_large_is_clamped_and_what_is_too_small_is_zero(codec: Codec) -> None:
    vector_N = torch.zeros(2 * codec.tile)
    vector_N[0], vector_N[codec.tile] = 3e38, 1e-37
    decoded_N = codec.decode(codec.encode(vector_N), vector_N.numel())
    assert decoded_N[0] == (127 if codec.name == "int8" else 7) * 2.0**100
    assert not decoded_N[1:].any()
