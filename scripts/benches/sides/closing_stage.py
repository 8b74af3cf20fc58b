"""A process with one member of a stage that is a whole model. It measures for how long the end of a round blocks.

    python -m scripts.benches.sides.closing_stage FOLDER NUMBER ROUNDS

Started by the closing bench, twice for each setting; the two processes average with each other. Stage, compute thread,
weights, averager, TLS and gRPC are those of a peer. Writes `NUMBER.json` to FOLDER.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import torch
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from peers.shared import process
from scripts.benches.shared import meeting
from scripts.benches.shared.backend import cpu_backend
from scripts.benches.shared.common import write_json
from swarm import config as configs
from swarm.averaging.averager import Averager
from swarm.averaging.servicer import AveragingServicer
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import Transport
from swarm.config import RunConfig
from swarm.credentials.identity import generate
from swarm.machine.clock import SystemClock
from swarm.machine.loop_lag import LoopLag
from swarm.rpc import tls
from swarm.rpc.channels import ChannelPool
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1.averaging_pb2_grpc import add_AveragingServiceServicer_to_server
from swarm.stage.boundary import TOKENS, request_specs
from swarm.stage.context import StageContext, StageLimits
from swarm.stage.member import StageMember
from swarm.stage.runtime import Runtime
from swarm.stage.stage import Stage
from swarm.stage.weights import StageWeights
from swarm.training import optim
from swarm.training.microbatch import Microbatch
from swarm.training.round_member import Contribution
from swarm.types import PeerRecord, PeerState

MEMBERS = 2
MICROBATCHES = 2
"""Microbatches of each member in a round."""
POLL_SECONDS = 0.002


class Times:
    """The seconds of one kind of work, for each time that it was done: by the clock, and of the processor."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Measure how long the block takes."""
        wall, cpu = time.perf_counter(), time.thread_time()
        yield
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.thread_time() - cpu)


class RoundTimes:
    """How long the ends of a stage's rounds took.

    Args:
        weights: their closings and commits are measured from now on.
        steps: the times of the optimizer's steps.
    """

    def __init__(self, weights: StageWeights, steps: Times) -> None:
        self.closings, self.commits, self._steps = Times(), Times(), steps
        self.beyond_steps = Times()
        """The times of commits, without the optimizer's steps in them."""
        self._close, self._commit = weights.close, weights.commit
        weights.close, weights.commit = self.close, self.commit  # type: ignore[method-assign]

    def close(self) -> Contribution:
        """Call the original `close`, and record how long it takes."""
        with self.closings.taken():
            return self._close()

    def commit(self, average: Mapping[str, torch.Tensor], **how: Any) -> float:
        """Call the original `commit`, and record how long it takes."""
        num_steps = len(self._steps.wall)
        with self.commits.taken():
            rate = self._commit(average, **how)
        self.beyond_steps.wall.append(self.commits.wall[-1] - sum(self._steps.wall[num_steps:]))
        self.beyond_steps.cpu.append(self.commits.cpu[-1] - sum(self._steps.cpu[num_steps:]))
        return rate


@contextmanager
def watched_loop(longest: list[float]) -> Iterator[None]:
    """Record the longest time that one callback of the event loop computes inside the block."""
    run = asyncio.Handle._run

    def watched(handle: asyncio.Handle) -> None:
        began_at = time.thread_time()
        run(handle)
        longest[0] = max(longest[0], time.thread_time() - began_at)

    with mock.patch.object(asyncio.Handle, "_run", watched):
        yield


def timed(step: Callable[..., None], times: Times) -> Callable[..., None]:
    """An optimizer's step, wrapped so that its times are recorded."""

    def stepping(*arguments: Any) -> None:
        with times.taken():
            step(*arguments)

    return stepping


async def train(stage: Stage, config: RunConfig, index: int) -> None:
    """Train and acknowledge one microbatch."""
    tokens = torch.zeros(request_specs(config, 0)[TOKENS].shape, dtype=torch.int32)
    microbatch = Microbatch(index=index, round=stage.round, num_samples=1, accumulate_only_at=None)
    subscriber = object()
    slot = stage.admission.admit(microbatch)
    computation = await stage.begin(microbatch, {TOKENS: tokens}, {}, subscriber)
    while not computation.done:
        await computation.news(60.0)
    computation.result()
    stage.endings.acknowledge(computation)
    stage.admission.leave(slot)
    while stage.answers.num_settling:  # noqa: ASYNC110 - done by a thread
        await asyncio.sleep(POLL_SECONDS)


async def main(folder: Path, number: int, num_rounds: int) -> None:
    """Meet the other member, train and commit, and stay until the other has committed too."""
    torch.set_num_threads(1)
    config = configs.load(folder / "run.toml")
    identity, channels, clock = generate(), ChannelPool(), SystemClock()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    port = bind_server(server, "127.0.0.1", 0, tls.server_credentials(identity))
    record = PeerRecord(
        peer_id=identity.peer_id,
        stage=0,
        endpoint=f"127.0.0.1:{port}",
        state=PeerState.SERVING,
        announced_at=0.0,
        certificate_pem=identity.certificate_pem,
    )
    backend = cpu_backend(config, 0, graph_bytes=1 << 40)
    steps, weights = Times(), backend.weights
    times = RoundTimes(weights, steps)
    runtime, longest, lag = Runtime(queue_capacity=64), [0.0], LoopLag(clock)
    runtime.start()
    meeting.put(folder / f"{number}.record", record.model_dump_json())
    texts = await meeting.all_there(folder / f"{member}.record" for member in range(MEMBERS))
    records = [PeerRecord.model_validate_json(text) for text in texts]
    digests, attempts, round_seconds = list[str](), list[int](), list[float]()
    async with asyncio.TaskGroup() as tasks:
        stage = Stage(
            StageContext(
                config=config,
                backend=backend,
                runtime=runtime,
                hop=None,
                clock=clock,
                tasks=tasks,
                limits=StageLimits(max_in_flight=4),
            )
        )
        member = StageMember(stage, num_alive=lambda: MEMBERS)
        context = Context(
            config=config, own=record, peers=lambda number: records, transport=Transport(channels), clock=clock
        )
        averager = Averager(context, member)
        stage.admission.open()
        add_AveragingServiceServicer_to_server(AveragingServicer(averager.handlers, own_id=identity.peer_id), server)
        add_HealthServicer_to_server(HealthServicer(), server)
        await server.start()
        works = averager.run(), stage.endings.report_changes(averager.notify), lag.run()
        background = [tasks.create_task(work) for work in works]
        with watched_loop(longest), mock.patch.object(optim, "step", timed(optim.step, steps)):
            for round_number in range(num_rounds):
                if round_number == 1:  # From the second round on, imports and first allocations are over.
                    lag, longest[0] = LoopLag(clock), 0.0
                    background.append(tasks.create_task(lag.run()))
                for microbatch in range(MICROBATCHES):
                    await train(stage, config, (round_number * MICROBATCHES + microbatch) * MEMBERS + number)
                trained_at = time.perf_counter()
                while weights.round.number == round_number:  # noqa: ASYNC110 - set on the compute thread
                    await asyncio.sleep(POLL_SECONDS)
                round_seconds.append(time.perf_counter() - trained_at)
                digests.append(await member.state_digest())
                attempts.append(member.reports[-1].attempts)
        write_json(
            folder / f"{number}.json",
            {
                "parameters": weights.num_elements,
                "digests": digests,
                "attempts": max(attempts),
                "round_seconds": statistics.median(round_seconds[1:]),
                "close_cpu_seconds": statistics.median(times.closings.cpu[1:]),
                "commit_cpu_seconds": statistics.median(times.commits.cpu[1:]),
                "commit_beyond_step_cpu_seconds": statistics.median(times.beyond_steps.cpu[1:]),
                "commit_beyond_step_seconds": statistics.median(times.beyond_steps.wall[1:]),
                "loop_held_seconds": longest[0],
                "loop_lag_seconds": lag.seconds,
            },
        )
        await meeting.all_there(folder / f"{member}.json" for member in range(MEMBERS))
        for task in background:
            task.cancel()
    runtime.stop(60.0)
    await server.stop(0)
    await channels.close()


if __name__ == "__main__":
    process.keep_freed_memory()
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
