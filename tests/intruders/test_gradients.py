"""Numbers that would spoil a gradient are refused with the right status, and the accumulated gradients do not
change."""

import re
from typing import Any

import grpc
import pytest
import torch

from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceStub
from swarm.stage.boundary import HIDDEN, TOKENS
from tests.intruders.host import Host, running
from tests.support import locked
from tests.support.chunks import chunks

INTRUDER = locked.PEER_TOKEN.admit(locked.OPEN)
RIGHT = {TOKENS: torch.zeros(2, 17, dtype=torch.int32), HIDDEN: torch.zeros(2, 16, 32)}


def _with(value: float) -> torch.Tensor:
    return torch.zeros(2, 16, 32).index_fill(1, torch.tensor([3]), value)


async def _refusal(host: Host, tensors: dict[str, torch.Tensor]) -> tuple[grpc.StatusCode, str]:
    async with host.connected(INTRUDER) as channel:
        stub: Any = StageServiceStub(channel)
        call = stub.Train(timeout=20)
        await call.write(pb.TrainRequest(open=pb.Open(address=host.address, microbatch=10**6, num_samples=2)))
        try:
            for name, tensor in tensors.items():
                for chunk in chunks(name, tensor):
                    await call.write(pb.TrainRequest(chunks=[chunk]))
            while await call.read() is not grpc.aio.EOF:
                pass
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            pass
        return await call.code(), await call.details()


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({HIDDEN: _with(float("nan"))}, "holds NaN, infinity, or numbers beyond 65504"),
        ({HIDDEN: _with(float("-inf"))}, "holds NaN, infinity, or numbers beyond 65504"),
        ({HIDDEN: _with(1e30)}, "holds NaN, infinity, or numbers beyond 65504"),
        ({HIDDEN: torch.zeros(2, 16, 33)}, r"\[2, 16, 33\], expected"),
        ({HIDDEN: torch.zeros(2 * 16 * 32)}, r"\[1024\], expected"),
        ({HIDDEN: torch.zeros(2, 16, 32, dtype=torch.bfloat16)}, "'bf16'"),
        ({TOKENS: torch.full((2, 17), 64, dtype=torch.int32)}, "outside the vocabulary"),
        ({TOKENS: torch.full((2, 17), -1, dtype=torch.int32)}, "outside the vocabulary"),
    ],
)
@pytest.mark.slow
async def test_what_comes_forward(tensors: dict[str, torch.Tensor], reason: str) -> None:
    async with running() as host:
        await host.train()
        bucket = host.server.stage.context.backend.weights.buckets.open()
        before = {name: value.clone() for name, value in bucket.sums.items()}
        code, details = await _refusal(host, {**RIGHT, **tensors})
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert re.search(reason, details), details
        assert all(torch.equal(value, before[name]) for name, value in bucket.sums.items())
        await host.idles()
        assert await host.train() > 0
