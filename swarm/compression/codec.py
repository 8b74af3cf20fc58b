"""Codecs of averaging: how a vector of float32 becomes bytes, and back; activations.py has the encodings of hops.

This file has the interface, and chooses codecs by a run's configuration. A codec is stateless and handles one part of a
vector at a time. Decoders trust no sender: they refuse wrong lengths and non-finite numbers, and allocate memory only
in proportion to the expected vector. docs/protocol.md has every layout byte by byte.

To add another codec, write a class that has this interface in a file of this folder, with the `sketch_tolerance` that
its roundings need, and give it a name in config/rounds.py and a case in `_codec`. In tests/compression/all_codecs.py
its name puts it through the tests of all.

Shapes: N elements of the part.
"""

from typing import Protocol, assert_never

import torch

from swarm.compression.buffers import TILE
from swarm.compression.buffers import Buffer as Buffer
from swarm.compression.dct import DctLowpass
from swarm.compression.quantize import Cast, Int4, Int8
from swarm.compression.sparsify import TopK
from swarm.config import AveragingConfig

RESULT_GROWTH = 4
"""Of a sum of contributions, a sparse codec keeps this many times the elements that it keeps of one contribution."""


class Codec(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def tile(self) -> int:
        """A vector is best cut into parts at multiples of this number of elements."""

    @property
    def needs_feedback(self) -> bool:
        """Whether the codec drops so much that error feedback has to add it to the next vector."""

    @property
    def is_sparse(self) -> bool:
        """Whether the codec keeps only some of the elements, so that a sum of vectors takes more bytes than a single
        vector."""

    @property
    def sketch_tolerance(self) -> float:
        """How far, as a share of its norm, a contribution may be from its gradients' sum; 0 if too much is dropped."""

    def encode(self, vector_N: torch.Tensor) -> Buffer:
        """Encode a finite float32 CPU vector. The bytes may share the vector's memory."""

    def decode(self, buffer: Buffer, num_elements: int) -> torch.Tensor:
        """Decode to float32, shape (N,). The result may share the buffer's memory. Raises MalformedMessage for a wrong
        length, impossible contents, or numbers that are not finite."""

    def num_bytes(self, num_elements: int) -> int:
        """Exact size of `num_elements` encoded elements, which depends on nothing else."""


_SIMPLE: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Cast("fp32", torch.float32, 0.02),
        Cast("fp16", torch.float16, 0.05),
        Cast("bf16", torch.bfloat16, 0.05),
        Int8(),
        Int4(),
    )
}


def simple_codec(name: str) -> Codec:
    """A codec that needs no options: fp32, fp16, bf16, int8 or int4. Raises ValueError for other names."""
    if name not in _SIMPLE:
        raise ValueError(f"unknown codec {name!r}; those without options are {', '.join(_SIMPLE)}")
    return _SIMPLE[name]


def contribution_codec(config: AveragingConfig) -> Codec:
    return _codec(config, config.top_k)


def result_codec(config: AveragingConfig) -> Codec:
    """The codec with which the owner of a part encodes the sum. A sum is less sparse, so a sparse codec keeps more."""
    return _codec(config, min(RESULT_GROWTH * config.top_k, TILE))


def _codec(config: AveragingConfig, top_k: int) -> Codec:
    match config.codec:
        case "fp32" | "fp16" | "bf16" | "int8" | "int4":
            return simple_codec(config.codec)
        case "topk":
            return TopK(top_k, config.values, config.indices, transform=False)
        case "dct-topk":
            return TopK(top_k, config.values, config.indices, transform=True)
        case "dct-lowpass":
            return DctLowpass()
        case other:
            assert_never(other)
