"""Stand-ins for the rest of the swarm around the stage that the memory bench measures.

Used by memory_stage. There is the next stage, which answers when it is told to, and the line to the other member, which
can be held.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import torch

from swarm.averaging.wire.transport import Method, Payload, Reply, Request, Transport
from swarm.hop.answers import HopListener, HopReply, Tensors
from swarm.hop.hop import Hop
from swarm.rpc.channels import ChannelPool
from swarm.rpc.stream import Stream
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.stage.boundary import GRADIENT, HIDDEN
from swarm.training.microbatch import Microbatch
from swarm.types import PeerId, PeerRecord


class Answer(HopReply):
    """A call that no caller waits for."""

    async def ack(self) -> None:
        pass

    def close(self) -> None:
        pass


class NextStage(Hop):
    """Stands in for the next stage. When told to, it answers the oldest call with random gradients."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.num_waiting = 0
        self._passes = asyncio.Semaphore(0)

    @property
    def is_held_up(self) -> bool:
        return False

    def answer_one(self) -> None:
        """Answer the call that has waited longest."""
        self._passes.release()

    async def train(
        self, microbatch: Microbatch, tensors: Tensors, listener: HopListener, hints: Mapping[int, PeerId]
    ) -> HopReply:
        self.num_waiting += 1
        try:
            await self._passes.acquire()
        finally:
            self.num_waiting -= 1
        gradient_BTD = 1e-3 * torch.randn_like(tensors[HIDDEN])
        return Answer(
            loss=0.0,
            tensors={GRADIENT: gradient_BTD},
            route={},
            num_reroutes=0,
            num_busy=0,
            _call=Stream(None),
        )


class HeldTransport(Transport):
    """Calls the other member over a line that can be held. Other stages always answer that they have reached the
    barrier."""

    def __init__(self, channels: ChannelPool, stage: int) -> None:
        super().__init__(channels)
        self._stage = stage
        self.line = asyncio.Event()

    async def call(
        self, peer: PeerRecord, method: Method[Request, Reply], request: Request, *, timeout_seconds: float
    ) -> Reply:
        if peer.stage != self._stage:
            ready: Any = pb.BarrierReply(ready=True)
            reply: Reply = ready
            return reply
        return await super().call(peer, method, request, timeout_seconds=timeout_seconds)

    async def exchange(self, *arguments: Any, **options: Any) -> Payload:
        await self.line.wait()
        return await super().exchange(*arguments, **options)
