"""Splits a tensor into chunks, for any kind of message."""

from collections.abc import Iterator

import torch

from swarm.rpc.v1.stage_pb2 import TrainRequest
from swarm.rpc.v1.tensor_pb2 import TensorChunk
from swarm.rpc.wire import Piece, frames, parsed, serialized


def chunks(name: str, tensor: torch.Tensor) -> Iterator[TensorChunk]:
    for frame in frames(TrainRequest(), {name: tensor}):
        yield from TrainRequest.FromString(serialized(frame)).chunks


def pieces(name: str, tensor: torch.Tensor) -> Iterator[Piece]:
    """The same chunks, as a reader of messages gets them."""
    for frame in frames(TrainRequest(), {name: tensor}):
        yield from parsed(TrainRequest, serialized(frame))[1]
