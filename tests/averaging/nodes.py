"""Averagers behind real gRPC servers on loopback."""

import asyncio
import dataclasses

import grpc
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from swarm.averaging.agreement.timing import Timing
from swarm.averaging.averager import Averager
from swarm.averaging.servicer import AveragingServicer
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import Transport
from swarm.config import RunConfig
from swarm.machine.clock import SystemClock
from swarm.rpc.channels import ChannelPool
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1.averaging_pb2_grpc import add_AveragingServiceServicer_to_server
from swarm.types import PeerRecord
from tests.averaging.doubles import QUICK, record
from tests.averaging.fake_stage import FakeStage

PATIENT = dataclasses.replace(
    QUICK, late_seconds=3.0, report_seconds=3.0, call_seconds=2.0, fresh_seconds=4.0, begin_seconds=5.0,
    average_seconds=10.0, commit_seconds=10.0, grace_seconds=0.5, silence_seconds=5.0,
)  # fmt: skip
"""Timeouts so long that the machine may pause for a second. A peer that dies breaks its connections, so its death is
still noticed at once."""


class Node:
    """One peer with a server of its own."""

    def __init__(self, stage: FakeStage | None = None, *, timing: Timing = PATIENT) -> None:
        self.stage = stage or FakeStage()
        self._timing = timing

    async def start(self, number: int, config: RunConfig, directory: list[PeerRecord]) -> None:
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        port = bind_server(self.server, "127.0.0.1", 0, None)
        self.record = record(number, endpoint=f"127.0.0.1:{port}")
        self.channels = ChannelPool(insecure=True)
        context = Context(
            config=config,
            own=self.record,
            peers=lambda stage: directory,
            transport=Transport(self.channels),
            clock=SystemClock(),
            timing=self._timing,
        )
        self.averager = Averager(context, self.stage)
        self.stage.averager = self.averager
        add_AveragingServiceServicer_to_server(AveragingServicer(self.averager.handlers), self.server)
        # Members that wait for an exchange ask for a sign of life meanwhile.
        add_HealthServicer_to_server(HealthServicer(), self.server)
        await self.server.start()
        self.task = asyncio.create_task(self.averager.run())

    async def kill(self) -> None:
        self.task.cancel()
        await self.server.stop(None)

    async def stop(self) -> None:
        await self.kill()
        await self.channels.close()
        await asyncio.wait([self.task])
