"""Splits a tensor into chunks, for any kind of message."""

from collections.abc import Iterator

import torch

from swarm.rpc.v1.stage_pb2 import TrainRequest
from swarm.rpc.v1.tensor_pb2 import TensorChunk
from swarm.rpc.wire import filled


def chunks(name: str, tensor: torch.Tensor) -> Iterator[TensorChunk]:
    """The chunks of a tensor, in their order."""
    for message in filled(TrainRequest(), {name: tensor}):
        yield from message.chunks
