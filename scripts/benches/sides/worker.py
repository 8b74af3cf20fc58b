"""A worker: a stage with its averager, outside a peer's program, for benches that measure a part of it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import torch
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from scripts.benches.shared.common import all_there, put
from swarm.averaging.agreement.timing import Timing
from swarm.averaging.averager import Averager
from swarm.averaging.servicer import AveragingServicer
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import Method, Payload, Reply, Request, Transport
from swarm.config import RunConfig
from swarm.credentials.identity import Identity
from swarm.hop.hop import Hop
from swarm.machine.clock import SystemClock
from swarm.rpc import tls
from swarm.rpc.channels import ChannelPool
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.averaging_pb2_grpc import add_AveragingServiceServicer_to_server
from swarm.stage.backend import StageBackend
from swarm.stage.context import StageContext, StageLimits
from swarm.stage.member import StageMember
from swarm.stage.runtime import Runtime
from swarm.stage.stage import Stage
from swarm.training.samples import Microbatch
from swarm.types import Block, PeerRecord, PeerState

PATIENCE_SECONDS = 60.0
PATIENT = Timing(
    report_gap_seconds=0.002, report_seconds=PATIENCE_SECONDS, call_seconds=PATIENCE_SECONDS,
    late_seconds=PATIENCE_SECONDS, fresh_seconds=PATIENCE_SECONDS, begin_seconds=PATIENCE_SECONDS,
    average_seconds=PATIENCE_SECONDS, commit_seconds=PATIENCE_SECONDS, silence_seconds=PATIENCE_SECONDS,
    takeover_seconds=0.5,
)  # fmt: skip
"""No worker counts as dead because it is slow. Calls to a killed one fail at once."""


class Place:
    """Where a worker can be reached: its record, and a server with TLS, which serves once it has an averager."""

    def __init__(self, identity: Identity, stage: int) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        port = bind_server(self._server, "127.0.0.1", 0, tls.server_credentials(identity))
        self.record = PeerRecord(
            peer_id=identity.peer_id, stage=stage, endpoint=f"127.0.0.1:{port}", state=PeerState.SERVING,
            announced_at=0.0, certificate_pem=identity.certificate_pem,
        )  # fmt: skip

    async def meet(self, folder: Path, number: int, num_members: int) -> list[PeerRecord]:
        """The records of all workers, each of which is a process that calls this with the same folder."""
        put(folder / f"{number}.record", self.record.model_dump_json())
        texts = await all_there(folder / f"{member}.record" for member in range(num_members))
        return [PeerRecord.model_validate_json(text) for text in texts]

    async def serve(self, averager: Averager) -> None:
        servicer = AveragingServicer(averager.handlers)
        add_AveragingServiceServicer_to_server(servicer, self._server)
        # A member asks another one that is slow to answer whether it is alive.
        add_HealthServicer_to_server(HealthServicer(), self._server)
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(0)


class HeldTransport(Transport):
    """Calls the other members over a line that can be held. Other stages always answer that they have reached the
    barrier."""

    def __init__(self, channels: ChannelPool, stage: int, line: asyncio.Event) -> None:
        super().__init__(channels)
        self._stage = stage
        self.line = line

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


class Worker:
    """A stage with its averager. Use it inside the task group that it gets."""

    def __init__(
        self, config: RunConfig, backend: StageBackend, *, own: PeerRecord,
        peers: Callable[[Block], Sequence[PeerRecord]], transport: Transport, runtime: Runtime,
        tasks: asyncio.TaskGroup, hop: Hop | None = None, max_in_flight: int = 4, timing: Timing | None = None,
        poll_seconds: float = 0.002,
    ) -> None:  # fmt: skip
        clock = SystemClock()
        self.weights, self.record = backend.weights, own
        self._poll_seconds = poll_seconds
        self.stage = Stage(
            StageContext(
                config=config, backend=backend, runtime=runtime, clock=clock, tasks=tasks,
                hops={} if hop is None else {hop.block: hop}, limits=StageLimits(max_in_flight=max_in_flight),
            )
        )  # fmt: skip
        self.member = StageMember(self.stage, num_alive=lambda: len(peers(own.block)))
        context = Context(
            config=config, own=own, peers=peers, transport=transport, clock=clock, timing=timing or Timing()
        )
        self.averager = Averager(context, self.member)
        self._tasks = tasks

    def start(self) -> None:
        works = self.averager.run(), self.stage.endings.report_changes(self.averager.notify)
        self._background = [self._tasks.create_task(work) for work in works]

    def stop(self) -> None:
        for task in self._background:
            task.cancel()

    async def train(self, index: int, tensors: Mapping[str, torch.Tensor], num_samples: int) -> None:
        """Train and acknowledge one microbatch, with the inner step if one is due."""
        microbatch = Microbatch(index=index, round=self.stage.round, num_samples=num_samples, accumulate_only_at=None)
        slot = self.stage.admission.admit(microbatch)
        try:
            computation = self.stage.begin(microbatch, tensors, {}, self)
            while not computation.done:
                await computation.news(PATIENCE_SECONDS)
            computation.result()
            self.stage.endings.acknowledge(computation)
        finally:
            self.stage.admission.leave(slot)
        while self.stage.answers.num_settling:  # noqa: ASYNC110 - done on the compute thread
            await asyncio.sleep(self._poll_seconds)
