"""A process with one member of a stage that is a whole model: how long does the end of a round block it?"""

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from peers.shared import process
from peers.stage_peer.own_process import LoopLag
from scripts.benches.shared.common import all_there, cpu_backend, write_json
from scripts.benches.sides.worker import Place, Worker
from swarm import config as configs
from swarm.averaging.wire.transport import Transport
from swarm.credentials.identity import generate
from swarm.machine.clock import SystemClock
from swarm.rpc.channels import ChannelPool
from swarm.stage.boundary import TOKENS, request_specs
from swarm.stage.runtime import Runtime
from swarm.stage.weights import StageWeights
from swarm.training import optim
from swarm.training.round_member import Contribution, RoundResult

MEMBERS = 2
MICROBATCHES = 2  # Microbatches of each member in a round
POLL_SECONDS = 0.002


class Times:
    """The seconds of one kind of work, for each time that it was done: by the clock, and of the processor."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    @contextmanager
    def taken(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.thread_time()
        yield
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.thread_time() - cpu)


class RoundTimes:
    """How long the closings and commits of weights take from now on, without the optimizer's steps in them."""

    def __init__(self, weights: StageWeights, steps: Times) -> None:
        self.closings, self.commits, self._steps = Times(), Times(), steps
        self.beyond_steps = Times()  # The times of commits, without the optimizer's steps in them
        self._contribute, self._commit = weights.contribute, weights.commit
        weights.contribute, weights.commit = self.contribute, self.commit  # type: ignore[method-assign]

    def contribute(self) -> Contribution:
        with self.closings.taken():
            return self._contribute()

    def commit(self, result: RoundResult) -> float:
        num_steps = len(self._steps.wall)
        with self.commits.taken():
            rate = self._commit(result)
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
    def stepping(*arguments: Any) -> None:
        with times.taken():
            step(*arguments)

    return stepping


async def main(folder: Path, number: int, num_rounds: int) -> None:
    process.keep_freed_memory()
    torch.set_num_threads(1)
    config = configs.load(folder / "run.toml")
    backend, channels, clock = cpu_backend(config, 0, graph_bytes=1 << 40), ChannelPool(), SystemClock()
    steps, weights = Times(), backend.weights
    times = RoundTimes(weights, steps)
    runtime, longest, lag = Runtime(queue_capacity=64), [0.0], LoopLag(clock)
    runtime.start()
    place = Place(generate(), 0)
    records = await place.meet(folder, number, MEMBERS)
    digests, attempts, round_seconds = list[str](), list[int](), list[float]()
    tokens = torch.zeros(request_specs(config, 0)[TOKENS].shape, dtype=torch.int32)
    async with asyncio.TaskGroup() as tasks:
        worker = Worker(
            config, backend, own=place.record, peers=lambda stage: records, transport=Transport(channels),
            runtime=runtime, tasks=tasks,
        )  # fmt: skip
        worker.stage.admission.open()
        await place.serve(worker.averager)
        worker.start()
        watching = [tasks.create_task(lag.run())]
        with watched_loop(longest), mock.patch.object(optim, "step", timed(optim.step, steps)):
            for round_number in range(num_rounds):
                if round_number == 1:  # From the second round on, imports and first allocations are over.
                    lag, longest[0] = LoopLag(clock), 0.0
                    watching.append(tasks.create_task(lag.run()))
                for microbatch in range(MICROBATCHES):
                    index = (round_number * MICROBATCHES + microbatch) * MEMBERS + number
                    await worker.train(index, {TOKENS: tokens}, 1)
                trained_at = time.perf_counter()
                while weights.round.number == round_number:  # noqa: ASYNC110 - set on the compute thread
                    await asyncio.sleep(POLL_SECONDS)
                round_seconds.append(time.perf_counter() - trained_at)
                digests.append(await worker.member.state_digest())
                attempts.append(worker.member.reports[-1].attempts)
        write_json(
            folder / f"{number}.json",
            {
                "parameters": weights.num_elements, "digests": digests, "attempts": max(attempts),
                "round_seconds": statistics.median(round_seconds[1:]),
                "close_cpu_seconds": statistics.median(times.closings.cpu[1:]),
                "commit_cpu_seconds": statistics.median(times.commits.cpu[1:]),
                "commit_beyond_step_cpu_seconds": statistics.median(times.beyond_steps.cpu[1:]),
                "commit_beyond_step_seconds": statistics.median(times.beyond_steps.wall[1:]),
                "loop_held_seconds": longest[0], "loop_lag_seconds": lag.seconds,
            },
        )  # fmt: skip
        await all_there(folder / f"{member}.json" for member in range(MEMBERS))
        for task in watching:
            task.cancel()
        worker.stop()
    runtime.stop(60.0)
    await place.close()
    await channels.close()
