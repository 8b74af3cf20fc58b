"""Splits a tensor into chunks, for any kind of message, and makes encoded ones."""

from collections.abc import Iterator

import torch

from swarm.rpc.v1.stage_pb2 import TrainRequest
from swarm.rpc.v1.tensor_pb2 import TensorChunk
from swarm.rpc.wire import DTYPES, Piece, frames, parsed, serialized

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def chunks(name: str, tensor: torch.Tensor) -> Iterator[TensorChunk]:
    for frame in frames(TrainRequest(), {name: tensor}, {name: _NAMES[tensor.dtype]}):
        yield from TrainRequest.FromString(serialized(frame)).chunks


def pieces(name: str, tensor: torch.Tensor) -> Iterator[Piece]:
    """The same chunks, as a reader of messages gets them."""
    for frame in frames(TrainRequest(), {name: tensor}, {name: _NAMES[tensor.dtype]}):
        yield from parsed(TrainRequest, serialized(frame))[1]


def int8_blocks(scale: float, num_blocks: int = 8, code: int = 1) -> torch.Tensor:
    """A hidden state in int8, as docs/protocol.md describes it."""
    scales = torch.full((num_blocks,), scale, dtype=torch.bfloat16).view(torch.uint8)
    return torch.cat([scales, torch.full((128 * num_blocks,), code, dtype=torch.int8).view(torch.uint8)])
