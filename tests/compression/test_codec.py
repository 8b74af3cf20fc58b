import pytest
import torch

from swarm.compression.codec import codec_names, get_codec
from swarm.errors import MalformedMessage


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("num_elements", [0, 1, 1000])
def test_round_trip(name: str, num_elements: int) -> None:
    codec = get_codec(name)
    vector_N = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
    encoded = codec.encode(vector_N)
    assert len(encoded) == codec.num_bytes(num_elements)
    decoded_N = codec.decode(bytes(encoded), num_elements)
    assert decoded_N.dtype == torch.float32
    torch.testing.assert_close(decoded_N, vector_N, rtol=0 if name == "fp32" else 1e-3, atol=1e-7)


def test_fp32_is_exact_to_the_sign_of_zero() -> None:
    vector_N = torch.tensor([-0.0, 1e-45, 3.4e38])
    decoded_N = get_codec("fp32").decode(bytes(get_codec("fp32").encode(vector_N)), 3)
    assert torch.equal(decoded_N.view(torch.int32), vector_N.view(torch.int32))


def test_fp16_clamps_what_it_cannot_hold() -> None:
    codec = get_codec("fp16")
    assert codec.decode(codec.encode(torch.tensor([1e6, -1e6])), 2).tolist() == [65504.0, -65504.0]


@pytest.mark.parametrize("name", codec_names())
def test_decoders_refuse_what_is_wrong(name: str) -> None:
    codec = get_codec(name)
    encoded = bytes(codec.encode(torch.ones(4)))
    for wrong in (encoded[:-1], encoded + b"\0", b""):
        with pytest.raises(MalformedMessage, match="bytes"):
            codec.decode(wrong, 4)
    with pytest.raises(MalformedMessage, match="NaN"):
        codec.decode(codec.encode(torch.tensor([1.0, torch.nan])), 2)


def test_unknown_codec_is_a_user_fault() -> None:
    with pytest.raises(ValueError, match="fp16, fp32"):
        get_codec("morse")
