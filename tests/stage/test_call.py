"""The messages of one request."""

from typing import Any

import torch

from scripts.benches.shared.proc import held_bytes
from swarm.rpc.bounds import CHUNK_BYTES
from swarm.rpc.callers import Caller, Callers
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.wire import TensorSpec, frames, serialized
from swarm.stage.call import Incoming

_MESSAGES = 40
_TENSOR = torch.zeros(CHUNK_BYTES // 4)
_SPEC = TensorSpec(shape=tuple(_TENSOR.shape), encoding="fp32")


class _Context:
    """The context of a call with one message."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self) -> Any:
        """A message of its own, which no other part holds."""
        return bytes(bytearray(self._data))


async def test_an_opening_keeps_nothing_of_what_came_with_it() -> None:
    """The opening is kept as long as its microbatch, which already has the tensors."""
    [frame] = frames(pb.TrainRequest(open=pb.Open(microbatch=7)), {"x": _TENSOR}, {"x": "fp32"})
    data, callers = serialized(frame), Callers()

    async def opening() -> pb.Open:
        incoming = Incoming(pb.TrainRequest, _Context(data), Caller("somebody"), callers)
        opened: pb.Open = await incoming.opening()
        incoming.expect({"x": _SPEC}, training=True)
        assert torch.equal((await incoming.tensors())["x"], _TENSOR)
        incoming.close()
        return opened

    await opening()  # What the first one allocates for good is not kept by the openings.
    before_bytes = held_bytes("VmRSS")
    openings = [await opening() for _ in range(_MESSAGES)]
    assert [each.microbatch for each in openings] == [7] * _MESSAGES
    assert held_bytes("VmRSS") - before_bytes < _MESSAGES * CHUNK_BYTES / 4
    assert callers.num_bytes == 0
