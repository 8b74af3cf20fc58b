"""Every codec that a configuration can name, for tests that hold for all of them."""

import itertools

import torch
from pydantic import TypeAdapter

from swarm.compression.codec import Codec, contribution_codec, result_codec
from swarm.config import AveragingConfig

DENSE = [
    TypeAdapter(AveragingConfig).validate_python({"codec": codec})
    for codec in ("fp32", "fp16", "bf16", "int8", "int4", "dct-lowpass")
]
SPARSE = [
    TypeAdapter(AveragingConfig).validate_python({"codec": codec, "values": values, "indices": indices, "top_k": top_k})
    for codec, values, indices, top_k in [
        *itertools.product(("topk", "dct-topk"), ("lut8", "2bit", "sign"), ("12bit", "elias-fano"), (64,)),
        ("topk", "2bit", "elias-fano", 12),
    ]
]


def _label(config: AveragingConfig) -> str:
    if config in DENSE:
        return config.codec
    return f"{config.codec}-{config.values}-{config.indices}-{config.top_k}"


CODECS: dict[str, Codec] = {
    **{_label(config): contribution_codec(config) for config in [*DENSE, *SPARSE]},
    "topk-result": result_codec(AveragingConfig(codec="topk", top_k=512)),
    "topk-all": result_codec(AveragingConfig(codec="topk", top_k=1024, values="lut8")),
}


def make_vector(num_elements: int, *, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers, shape (num_elements,)."""
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed))


def relative_error(decoded_N: torch.Tensor, vector_N: torch.Tensor) -> float:
    """Norm of the difference, over the norm of the vector."""
    return float((decoded_N - vector_N).norm() / vector_N.norm())
