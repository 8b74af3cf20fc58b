"""A process with one member of a middle stage. It measures its own memory.

    python -m scripts.benches.sides.memory_stage FOLDER NUMBER GRAPH_BYTES IN_FLIGHT

The memory bench starts it twice for each case; the two processes average with each other. Stage, compute thread,
weights, averager, TLS and gRPC are those of a peer. Stand-ins take the place of the stages before and after.
Microbatches begin one by one, until IN_FLIGHT of them wait for their gradients. From then on one is finished for each
that begins. Two rounds are trained, and the second one is measured. Writes `NUMBER.json` to FOLDER.
"""

import asyncio
import itertools
import sys
from collections import deque
from pathlib import Path

import grpc
import torch
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from peers.shared import process
from scripts.benches.shared import meeting
from scripts.benches.shared.backend import cpu_backend
from scripts.benches.shared.common import write_json
from scripts.benches.shared.proc import forget_peak, peak_bytes, resident_bytes
from scripts.benches.sides.diloco.driven_swarm import TIMING
from scripts.benches.sides.memory_neighbours import HeldTransport, NextStage
from swarm import config as configs
from swarm.averaging.averager import Averager
from swarm.averaging.servicer import AveragingServicer
from swarm.averaging.wire.context import Context
from swarm.config import DataConfig, ModelConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.credentials.identity import generate
from swarm.machine.clock import SystemClock
from swarm.rpc import tls
from swarm.rpc.channels import ChannelPool
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1.averaging_pb2_grpc import add_AveragingServiceServicer_to_server
from swarm.stage.boundary import HIDDEN, TOKENS, request_specs
from swarm.stage.context import StageContext, StageLimits
from swarm.stage.member import StageMember
from swarm.stage.runtime import Runtime
from swarm.stage.stage import Stage
from swarm.training.microbatch import Microbatch
from swarm.types import PeerRecord, PeerState

STAGE = 1
MEMBERS = 2
WAVES = 3
"""In a round a member trains this many times IN_FLIGHT microbatches."""
POLL_SECONDS = 0.001
SETTLE_SECONDS = 1.0
"""Time to wait after a round, because its calls end a little later than the round."""


class Member:
    """One member, and its microbatches."""

    def __init__(
        self,
        config: RunConfig,
        number: int,
        *,
        graph_bytes: int,
        num_in_flight: int,
        records: list[PeerRecord],
        transport: HeldTransport,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._config = config
        self._number = number
        self._num_in_flight = num_in_flight
        self._transport = transport
        self._tasks = tasks
        backend = cpu_backend(config, STAGE, graph_bytes=graph_bytes)
        self._weights = backend.weights
        self.runtime = Runtime(queue_capacity=64)
        self._next = NextStage(STAGE + 1)
        self._stage = Stage(
            StageContext(
                config=config,
                backend=backend,
                runtime=self.runtime,
                hop=self._next,
                clock=SystemClock(),
                tasks=tasks,
                limits=StageLimits(max_in_flight=2 * num_in_flight),
            )
        )
        self._member = StageMember(self._stage, num_alive=lambda: MEMBERS)
        context = Context(
            config=config,
            own=records[number],
            peers=lambda stage: [record for record in records if record.stage == stage],
            transport=transport,
            clock=SystemClock(),
            timing=TIMING,
        )
        self.averager = Averager(context, self._member)
        self._stage.admission.open()
        self._microbatches: deque[asyncio.Task[None]] = deque()
        """The microbatches that wait for their gradients, oldest first."""
        self._indices = itertools.count(number, MEMBERS)
        self._figures: dict[str, int] = {}

    async def report_changes(self) -> None:
        """Report changes to the averager, until cancelled."""
        await self._stage.endings.report_changes(self.averager.notify)

    async def measure(self, baseline_bytes: int) -> dict[str, int]:
        """Train two rounds. Return the bytes beyond the baseline in the second one."""
        await self._train_round()
        forget_peak()
        await self._train_round()
        while self._microbatches:
            await self._finish_one()
        await asyncio.sleep(SETTLE_SECONDS)
        self._figures["after_round"] = before_bytes = resident_bytes()
        snapshot = await self._member.snapshot()
        with_snapshot_bytes = resident_bytes()
        del snapshot
        return {
            **{name: value - baseline_bytes for name, value in self._figures.items()},
            "snapshot": with_snapshot_bytes - before_bytes,
        }

    async def _train_round(self) -> None:
        number = self._weights.round.number
        size = self._config.data.microbatch_size
        due = self._config.rounds.round_samples // size // MEMBERS - self._weights.round_samples // size
        synchronous = self._config.rounds.synchronous
        self._transport.line.clear()
        if synchronous:
            # In the synchronous setting a round ends only when nothing is in flight.
            self._indices = itertools.count(number * self._config.microbatches_per_round + self._number, MEMBERS)
        while len(self._microbatches) < self._num_in_flight:
            await self._begin_one()
        for finished in range(due):
            if finished == self._num_in_flight:
                self._figures |= {"in_flight": resident_bytes(), "training_peak": peak_bytes()}
            await self._finish_one()
            if not synchronous or finished < due - self._num_in_flight:
                await self._begin_one()
        while not self._weights.round.closed:  # noqa: ASYNC110 - set on the compute thread
            await asyncio.sleep(POLL_SECONDS)
        forget_peak()
        if not synchronous:
            # This makes an inner step while the round is exchanged.
            for _ in range(self._num_in_flight):
                await self._finish_one()
                await self._begin_one()
        self._transport.line.set()
        while self._weights.round.number == number:  # noqa: ASYNC110 - as above
            await asyncio.sleep(POLL_SECONDS)
        self._figures["round_peak"] = peak_bytes()

    async def _begin_one(self) -> None:
        """Begin a microbatch, and return when it waits for its gradient."""
        self._microbatches.append(self._tasks.create_task(self._train(next(self._indices))))
        while self._next.num_waiting < len(self._microbatches):  # noqa: ASYNC110 - computed by a thread
            await asyncio.sleep(POLL_SECONDS)

    async def _finish_one(self) -> None:
        """Finish the oldest microbatch, and take the step that follows if one is due."""
        self._next.answer_one()
        await self._microbatches.popleft()

    async def _train(self, index: int) -> None:
        tensors = random_inputs(self._config)
        size = self._config.data.microbatch_size
        microbatch = Microbatch(index=index, round=self._stage.round, num_samples=size, accumulate_only_at=None)
        slot = self._stage.admission.admit(microbatch)
        computation = await self._stage.begin(microbatch, tensors, {}, self)
        while not computation.done:
            await computation.news(TIMING.average_seconds)
        computation.result()
        self._stage.endings.acknowledge(computation)
        self._stage.admission.leave(slot)
        while self._stage.answers.num_settling:  # noqa: ASYNC110 - done by a thread
            await asyncio.sleep(POLL_SECONDS)


def random_inputs(config: RunConfig) -> dict[str, torch.Tensor]:
    """Random tensors such as the stage before would send."""
    specs = request_specs(config, STAGE)
    return {TOKENS: torch.zeros(specs[TOKENS].shape, dtype=torch.int32), HIDDEN: torch.randn(specs[HIDDEN].shape)}


def warm_up() -> None:
    """Compute a first gradient, so that the memory that torch takes for it does not count for the stage."""
    config = RunConfig(
        model=ModelConfig(num_layers=2, d_model=64, num_heads=2),
        stages=StagesConfig(num_stages=1),
        data=DataConfig(sequence_length=32, microbatch_size=2),
        rounds=RoundsConfig(setting="diloco", round_samples=2, inner_batch_samples=2),
    )
    backend = cpu_backend(config, 0, graph_bytes=1 << 30)
    _, _, accumulated = backend.forward_loss(0, 0, {TOKENS: torch.zeros(2, 33, dtype=torch.int32)}, accumulate=True)
    assert accumulated is not None
    backend.settle(accumulated)


async def main(folder: Path, number: int, graph_bytes: int, num_in_flight: int) -> None:
    """Meet the other member, be measured, and stay until the other has been measured too."""
    torch.set_num_threads(1)
    config = configs.load(folder / "run.toml")
    identity, channels = generate(), ChannelPool()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    port = bind_server(server, "127.0.0.1", 0, tls.server_credentials(identity))
    record = PeerRecord(
        peer_id=identity.peer_id,
        stage=STAGE,
        endpoint=f"127.0.0.1:{port}",
        state=PeerState.SERVING,
        announced_at=0.0,
        certificate_pem=identity.certificate_pem,
    )
    meeting.put(folder / f"{number}.record", record.model_dump_json())
    texts = await meeting.all_there(folder / f"{member}.record" for member in range(MEMBERS))
    records = [PeerRecord.model_validate_json(text) for text in texts]
    # The averager asks these peers at the other stages.
    neighbour = record.model_copy(update={"peer_id": generate().peer_id})
    records += [neighbour.model_copy(update={"stage": stage}) for stage in (STAGE - 1, STAGE + 1)]
    warm_up()
    baseline_bytes = resident_bytes()
    async with asyncio.TaskGroup() as tasks:
        member = Member(
            config,
            number,
            graph_bytes=graph_bytes,
            num_in_flight=num_in_flight,
            records=records,
            transport=HeldTransport(channels, STAGE),
            tasks=tasks,
        )
        servicer = AveragingServicer(member.averager.handlers, own_id=identity.peer_id)
        add_AveragingServiceServicer_to_server(servicer, server)
        # Other peers ask a slow peer whether it is alive.
        add_HealthServicer_to_server(HealthServicer(), server)
        await server.start()
        member.runtime.start()
        averaging = tasks.create_task(member.averager.run())
        reporting = tasks.create_task(member.report_changes())
        figures = await member.measure(baseline_bytes)
        write_json(folder / f"{number}.json", {**figures, "baseline": baseline_bytes})
        await meeting.all_there(folder / f"{member}.json" for member in range(MEMBERS))
        averaging.cancel()
        reporting.cancel()
    member.runtime.stop(TIMING.average_seconds)
    await server.stop(0)
    await channels.close()


if __name__ == "__main__":
    process.keep_freed_memory()
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
