"""What every codec promises."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.compression.codec import Codec, result_codec
from swarm.config import AveragingConfig
from swarm.errors import MalformedMessage
from tests.compression.all_codecs import CODECS, make_vector, relative_error

LENGTHS = [0, 1, 5, 127, 128, 129, 4095, 4096, 4097, 300_001]

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())


@every_codec
def test_sizes_are_exact_and_any_buffer_decodes_to_the_same(codec: Codec) -> None:
    for num_elements in LENGTHS:
        vector_N = make_vector(num_elements)
        encoded = codec.encode(vector_N)
        assert len(encoded) == codec.num_bytes(num_elements)
        decoded_N = codec.decode(encoded, num_elements)
        assert decoded_N.shape == (num_elements,)
        assert decoded_N.dtype == torch.float32
        assert torch.equal(vector_N, make_vector(num_elements)), "the vector was written to"
        for buffer in (bytes(encoded), bytearray(encoded), memoryview(bytes(encoded))):
            assert torch.equal(codec.decode(buffer, num_elements), decoded_N)


@every_codec
def test_encoding_twice_gives_the_same_bytes(codec: Codec) -> None:
    assert bytes(codec.encode(make_vector(9000))) == bytes(codec.encode(make_vector(9000)))


@every_codec
def test_parts_cut_at_tiles_decode_to_what_the_whole_does(codec: Codec) -> None:
    """With sparse codecs this holds only approximately, because a header, table or largest magnitude belongs to a whole
    part."""
    vector_N = make_vector(3 * 4096 + 500)
    whole_N = codec.decode(codec.encode(vector_N), vector_N.numel())
    assert 4096 % codec.tile == 0
    parts = [codec.decode(codec.encode(part_N), part_N.numel()) for part_N in vector_N.tensor_split([4096, 8192])]
    parts_N = torch.cat(parts)
    assert torch.equal(parts_N != 0, whole_N != 0)
    assert relative_error(parts_N, whole_N) <= (0.03 if codec.is_sparse else 0)


@every_codec
def test_zeros_stay_zeros(codec: Codec) -> None:
    assert not codec.decode(codec.encode(torch.zeros(5000)), 5000).any()


@pytest.mark.parametrize("label", [label for label in CODECS if label != "fp16"])
@pytest.mark.parametrize("scale", [1e-30, 1e28])
def test_the_error_does_not_depend_on_the_scale(label: str, scale: float) -> None:
    """fp16 is left out, because its range is narrow."""
    codec = CODECS[label]
    vector_N = make_vector(5000)
    error = relative_error(codec.decode(codec.encode(vector_N), 5000), vector_N)
    scaled_N = vector_N.double() * scale
    decoded_N = codec.decode(codec.encode(scaled_N.float()), 5000).double() / scale
    assert relative_error(decoded_N, vector_N.double()) == pytest.approx(error, rel=0.02, abs=1e-6)


@every_codec
def test_the_largest_numbers_give_finite_ones(codec: Codec) -> None:
    vector_N = torch.finfo(torch.float32).max * make_vector(5000).sign()
    try:
        decoded_N = codec.decode(codec.encode(vector_N), 5000)
    except MalformedMessage:
        # A sum in the cosine transform may overflow.
        assert codec.name.startswith("dct")
    else:
        assert torch.isfinite(decoded_N).all()


@every_codec
def test_wrong_lengths_are_refused(codec: Codec) -> None:
    encoded = bytes(codec.encode(make_vector(100)))
    for wrong in (encoded[:-1], encoded + b"\0", b""):
        with pytest.raises(MalformedMessage, match=f"100 elements of {codec.name} takes? .* bytes, not {len(wrong)}"):
            codec.decode(wrong, 100)


@every_codec
def test_a_vector_that_is_not_finite_is_refused_at_the_latest_by_who_decodes_it(codec: Codec) -> None:
    vector_N = make_vector(5000)
    vector_N[4321] = torch.nan
    with pytest.raises(MalformedMessage):
        codec.decode(codec.encode(vector_N), 5000)


@every_codec
@settings(max_examples=20)
@given(data=st.data())
def test_whatever_the_bytes_a_decoder_refuses_or_gives_finite_numbers(codec: Codec, data: st.DataObject) -> None:
    num_elements = data.draw(st.sampled_from([1, 130, 4100]))
    encoded = bytearray(codec.encode(make_vector(num_elements)))
    if data.draw(st.booleans()):
        for _ in range(data.draw(st.integers(1, 4))):
            bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
            encoded[bit // 8] ^= 1 << bit % 8
    else:
        random = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
        start = data.draw(st.sampled_from([0, len(encoded) // 2]))
        encoded[start:] = random.bytes(len(encoded) - start)
    try:
        decoded_N = codec.decode(encoded, num_elements)
    except MalformedMessage:
        return
    assert decoded_N.shape == (num_elements,)
    assert torch.isfinite(decoded_N).all()


@every_codec
def test_only_contributions_that_err_by_less_than_the_tolerance_are_compared_with_sketches(codec: Codec) -> None:
    vector_N = make_vector(9000)
    error = relative_error(codec.decode(codec.encode(vector_N), 9000), vector_N)
    assert (codec.sketch_tolerance > 0) == (codec.name in {"fp32", "fp16", "bf16", "int8"})
    assert error < codec.sketch_tolerance / 2 or codec.sketch_tolerance == 0


def test_a_sum_keeps_four_times_as_many_and_at_most_everything() -> None:
    vector_N = make_vector(4096)
    for top_k, kept in ((64, 256), (1024, 4096)):
        codec = result_codec(AveragingConfig(codec="topk", top_k=top_k))
        assert int((codec.decode(codec.encode(vector_N), 4096) != 0).sum()) == kept
