import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.compression.sparsify import EliasFano, IndexCoder, TopK, TwelveBit
from swarm.compression.values import LEVELS, Field, Numbers, pack, unpack
from swarm.config.rounds import Indices, Values
from swarm.errors import MalformedMessage
from tests.compression.all_codecs import make_vector, relative_error


def _codec(
    values: Values = "2bit", indices: Indices = "elias-fano", *, top_k: int = 64, transform: bool = False
) -> TopK:
    return TopK(top_k, values, indices, transform=transform)


@pytest.mark.parametrize(
    ("values", "indices", "header_bytes", "bits_of_a_tile"),
    [
        ("2bit", "elias-fano", 4, 159 + 399 + 2 * 8 + 64),
        ("2bit", "12bit", 4, 64 * 12 + 2 * 8 + 64),
        ("sign", "elias-fano", 4, 511 + 8 + 64),
        ("sign", "12bit", 4, 64 * 12 + 8 + 64),
        ("lut8", "elias-fano", 1024, 511 + 64 * 8),
        ("lut8", "12bit", 1024, 64 * 12 + 64 * 8),
    ],
)
def test_sizes_follow_the_documented_formula(
    values: Values, indices: Indices, header_bytes: int, bits_of_a_tile: int
) -> None:
    for num_elements, tiles in ((0, 0), (1, 1), (4096, 1), (4097, 2), (1 << 20, 256)):
        expected = header_bytes + -(-tiles * bits_of_a_tile // 8)
        assert _codec(values, indices).num_bytes(num_elements) == expected


@pytest.mark.parametrize("values", ["lut8", "2bit", "sign"])
@pytest.mark.parametrize("indices", ["12bit", "elias-fano"])
@pytest.mark.parametrize("num_elements", [4096, 1_060_000])
def test_the_largest_of_each_tile_are_kept(values: Values, indices: Indices, num_elements: int) -> None:
    vector_N = make_vector(num_elements)
    codec = _codec(values, indices)
    decoded_N = codec.decode(codec.encode(vector_N), num_elements)
    assert torch.equal(decoded_N.sign(), decoded_N.sign() * (decoded_N != 0))
    for start in range(0, num_elements, 4096):
        tile_E, decoded_E = vector_N[start : start + 4096], decoded_N[start : start + 4096]
        kept = decoded_E != 0
        assert int(kept.sum()) == 64
        assert torch.equal(kept.nonzero()[:, 0], tile_E.abs().topk(64).indices.sort().values)
        assert torch.equal(decoded_E[kept].sign(), tile_E[kept].sign())
    kept = decoded_N != 0
    bounds = {"lut8": 0.02, "2bit": 0.11, "sign": 0.16}
    assert relative_error(decoded_N[kept], vector_N[kept]) <= bounds[values]


@pytest.mark.parametrize("top_k", [4, 100, 4096])
@pytest.mark.parametrize("distinct", [1, 2, 3000])
def test_of_equal_magnitudes_the_first_are_kept(top_k: int, distinct: int) -> None:
    """The bytes follow from the numbers, however many are equal and whatever sorts them."""
    generator = torch.Generator().manual_seed(top_k)
    vector_N = torch.randint(distinct, (3 * 4096 - 17,), generator=generator) / distinct
    vector_N *= torch.randint(2, vector_N.shape, generator=generator) * 2 - 1
    codec = _codec("sign", "12bit", top_k=top_k)
    columns = unpack(
        np.frombuffer(codec.encode(vector_N), dtype=np.uint8)[4:], [Field(top_k, 12), Field(1, 8), Field(top_k, 1)], 3
    )
    tiles_TE = np.append(vector_N.abs().numpy(), np.zeros(17, dtype=np.float32)).reshape(3, 4096)
    expected = np.sort(np.argsort(-tiles_TE, axis=1, kind="stable")[:, :top_k], axis=1)
    assert (columns[0] == expected).all()


def test_what_is_not_a_number_is_kept_and_so_refused_by_every_receiver() -> None:
    for num_bad in (1, 100, 4096):
        vector_N = make_vector(2 * 4096)
        vector_N[4096 : 4096 + num_bad] = float("nan")
        with pytest.raises(MalformedMessage):
            _codec().decode(_codec().encode(vector_N), 2 * 4096)


@pytest.mark.parametrize("num_elements", [1, 3, 50, 64, 65, 4096 + 10])
def test_a_short_last_tile_keeps_real_elements_first(num_elements: int) -> None:
    vector_N = 1 + make_vector(num_elements).abs()
    for values in ("lut8", "2bit", "sign"):
        decoded_N = _codec(values).decode(_codec(values).encode(vector_N), num_elements)
        last = (num_elements - 1) // 4096 * 4096
        assert int((decoded_N[last:] != 0).sum()) == min(num_elements - last, 64)
        assert relative_error(decoded_N[last:], vector_N[last:]) <= 0.5


@pytest.mark.parametrize("indices", ["12bit", "elias-fano"])
def test_the_layout_is_the_documented_one(indices: Indices) -> None:
    num_elements = 2 * 4096 + 100
    encoded = bytes(_codec("2bit", indices).encode(make_vector(num_elements)))
    decoded_N = _codec("2bit", indices).decode(encoded, num_elements)
    assert decoded_N.tolist() == _decode_in_python(encoded, indices)[:num_elements]


def _decode_in_python(encoded: bytes, indices: Indices) -> list[float]:
    """Three tiles in two groups of 16 and 48, decoded one number at a time."""
    largest = np.frombuffer(encoded, dtype="<f4", count=1)[0]
    stream = int.from_bytes(encoded[4:], "little")

    def bits() -> Iterator[int]:
        place = 0
        while True:
            yield stream >> place & 1
            place += 1

    source = bits()

    def number(width: int) -> int:
        return sum(next(source) << i for i in range(width))

    vector = [0.0] * (3 * 4096)
    for tile in range(3):
        places = []
        for count, low_bits, unary_bits in ((16, 8, 31), (48, 6, 111)):
            if indices == "12bit":
                places += [number(12) for _ in range(count)]
                continue
            low = [number(low_bits) for _ in range(count)]
            ones = [place for place in range(unary_bits) if next(source)]
            places += [((one - i) << low_bits) + low[i] for i, one in enumerate(ones)]
        magnitudes = [LEVELS[number(8)] * largest for _ in range(2)]
        for rank, place in enumerate(places):
            magnitude = float(magnitudes[rank >= 16])
            vector[4096 * tile + place] = -magnitude if next(source) else magnitude
    return vector


def test_an_element_in_both_groups_is_refused() -> None:
    codec = _codec(indices="12bit")
    encoded = bytearray(codec.encode(make_vector(4096)))
    # The first index of the second group becomes that of the first one, if it stays below its successor.
    stream = int.from_bytes(encoded[4:], "little")
    first = stream & 0xFFF
    place = 12 * 16
    while stream >> place + 12 & 0xFFF <= first:
        place += 12
    stream = stream & ~(0xFFF << place) | first << place
    encoded[4:] = stream.to_bytes(len(encoded) - 4, "little")
    with pytest.raises(MalformedMessage, match="kept twice"):
        codec.decode(encoded, 4096)


def test_a_transform_that_overflows_is_refused() -> None:
    codec = _codec("lut8", top_k=1024, transform=True)
    encoded = bytearray(codec.encode(make_vector(4096)))
    encoded[:1024] = struct.pack("<256f", *[3e38] * 256)
    with pytest.raises(MalformedMessage, match="NaN or infinity"):
        codec.decode(encoded, 4096)


COUNTS = [1, 3, 16, 48, 64, 100, 255, 1024, 3072, 4096]


def _indices(num_rows: int, count: int, seed: int) -> Numbers:
    random = np.random.default_rng(seed)
    rows = [np.sort(random.choice(4096, count, replace=False)) for _ in range(num_rows)]
    return np.array(rows, dtype=np.uint16).reshape(num_rows, count)


@settings(max_examples=40)
@given(count=st.sampled_from(COUNTS), num_rows=st.integers(0, 5), seed=st.integers(0, 1 << 30))
def test_both_coders_read_back_what_they_write(count: int, num_rows: int, seed: int) -> None:
    indices_RG = _indices(num_rows, count, seed)
    for coder in (EliasFano(count), TwelveBit(count)):
        packed = pack(coder.encode(indices_RG), coder.fields)
        columns = unpack(packed, coder.fields, num_rows)
        np.testing.assert_array_equal(coder.decode(columns), indices_RG)


@pytest.mark.parametrize("coder", [EliasFano(4), TwelveBit(4)], ids=["elias-fano", "12bit"])
@pytest.mark.parametrize("wrong", [[5, 5, 6, 7], [5, 4, 6, 7], [1, 2, 4095, 0]])
def test_indices_that_do_not_rise_are_refused(coder: IndexCoder, wrong: list[int]) -> None:
    columns = coder.encode(np.array([[1, 2, 3, 4095], sorted(wrong)], dtype=np.uint16))
    if isinstance(coder, EliasFano):
        # High parts rise by construction, so only the low parts within one of them can be in a wrong order.
        columns = [np.array([[1, 2, 3, 4], low], dtype=np.uint16) for low in [wrong]] + [
            coder.encode(np.array([[1, 2, 3, 4]] * 2, dtype=np.uint16))[1]
        ]
    else:
        columns = [np.array([[1, 2, 3, 4095], wrong], dtype=np.uint16)]
    with pytest.raises(MalformedMessage, match="do not rise"):
        coder.decode(columns)


@pytest.mark.parametrize("num_ones", [0, 3, 5, 7])
def test_elias_fano_refuses_a_wrong_number_of_ones(num_ones: int) -> None:
    coder = EliasFano(4)
    assert coder.fields == (Field(4, 10), Field(7, 1))
    low, unary = coder.encode(_indices(2, 4, seed=0))
    unary[1] = np.arange(7) < num_ones
    with pytest.raises(MalformedMessage, match="does not have 4 ones"):
        coder.decode([low, unary])
    # It is also wrong if one row has too many ones, and another one has as many too few.
    unary[0] = np.arange(7) < 8 - num_ones
    with pytest.raises(MalformedMessage, match="does not have 4 ones"):
        coder.decode([low, unary])
