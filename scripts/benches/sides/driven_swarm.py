"""A one-stage swarm in one process: a stage, weights and an averager for every peer, and a driver that feeds them.

The compute threads and the trainer are left out.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from scripts.benches.shared.common import cpu_backend
from scripts.benches.sides.worker import PATIENT, HeldTransport, Place, Worker
from swarm.config import RunConfig
from swarm.credentials.identity import generate
from swarm.data.microbatches import Microbatches
from swarm.errors import DeadlineExceeded, IntegrityError
from swarm.rpc.channels import ChannelPool
from swarm.stage.boundary import TOKENS
from swarm.stage.runtime import Runtime
from swarm.stage.task_queue import Priority
from swarm.types import PeerRecord

ROUND_SECONDS = 120.0  # Longest wait for a round. On an idle machine it takes milliseconds.
POLL_SECONDS = 0.0005

_Result = TypeVar("_Result")


class InlineRuntime(Runtime):
    """Takes the place of the compute thread: work is done at once, by the caller."""

    def __init__(self) -> None:
        super().__init__(queue_capacity=1)

    async def run(self, work: Callable[[], _Result], *, priority: Priority, age: int = 0) -> tuple[_Result, float]:
        return work(), 0.0


class DrivenSwarm:
    """Workers that train round after round. Use and stop it inside the task group that it gets."""

    def __init__(self, config: RunConfig, data: Microbatches, tasks: asyncio.TaskGroup) -> None:
        self._config = config
        self._data = data
        self._tasks = tasks
        self._line = asyncio.Event()
        self._line.set()
        self._channels = ChannelPool()
        self._places: dict[str, Place] = {}
        self._indices = itertools.count()
        self.workers: list[Worker] = []
        self.bytes_averaged = 0  # The bytes that all workers have sent and received
        self.num_attempts = 0  # The number of attempts to commit a round
        self.num_lost_samples = 0  # The samples on which killed workers had trained, and which are in no average

    @property
    def round(self) -> int:
        return self.workers[0].weights.round.number

    @property
    def anchor(self) -> Mapping[str, torch.Tensor]:
        anchor = self.workers[0].weights.anchor(self.round)
        assert anchor is not None, "the current round's is always there"
        return anchor

    async def start(self, num_workers: int) -> None:
        self.workers = [await self._new_worker() for _ in range(num_workers)]

    async def stop(self) -> None:
        for worker in self.workers:
            worker.stop()
        for place in self._places.values():
            await place.close()
        await self._channels.close()

    async def train_round(self, replaced: int | None = None) -> None:
        """Train one round, and wait until all workers have committed it. A worker may be killed in the middle of the
        round, and replaced. Raises DeadlineExceeded, and IntegrityError if afterwards the workers hold different states
        or one was left out."""
        number = self.round
        if replaced is not None:
            await self._feed(self._config.rounds.round_samples // 2)
            await self._replace(replaced)
        overlap_steps = self._config.averaging.overlap_steps
        if overlap_steps:
            self._line.clear()
        await self._feed(self._config.rounds.round_samples)
        if overlap_steps:
            await self._until(lambda: all(worker.weights.round.closed for worker in self.workers), "closed")
            await self._train_during_exchange(overlap_steps)
            self._line.set()
        await self._until(lambda: all(worker.weights.round.number > number for worker in self.workers), "committed")
        digests = {await worker.member.state_digest() for worker in self.workers}
        if len(digests) > 1:
            raise IntegrityError(f"after round {number} the workers hold different states")
        reports = [worker.member.reports[-1] for worker in self.workers]
        if reports[0].num_members < len(self.workers):
            raise IntegrityError(f"only {reports[0].num_members} workers took part in round {number}")
        self.bytes_averaged += sum(report.bytes_sent + report.bytes_received for report in reports)
        self.num_attempts += reports[0].attempts

    async def _feed(self, num_samples: int) -> None:
        """Hand out microbatches in turn until the workers have this many samples of the round."""
        turns = itertools.cycle(self.workers)
        while sum(worker.member.progress().num_samples for worker in self.workers) < num_samples:
            await self._until(self._all_open, "open")
            await self._train_next(next(turns))

    async def _train_during_exchange(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for worker in self.workers:
                await self._train_next(worker)
        assert not any(worker.weights.num_unstepped_samples for worker in self.workers), "inner steps go on meanwhile"

    async def _train_next(self, worker: Worker) -> None:
        index = next(self._indices)
        tokens = torch.from_numpy(self._data.tokens(index))
        await worker.train(index, {TOKENS: tokens}, len(tokens))

    async def _replace(self, number: int) -> None:
        dead = self.workers[number]
        dead.stop()
        await self._places.pop(dead.record.peer_id).close()
        self.num_lost_samples += dead.member.progress().num_samples
        self.workers[number] = await self._new_worker()

    async def _new_worker(self) -> Worker:
        place = Place(generate(), 0)
        self._places[place.record.peer_id] = place
        worker = Worker(
            self._config, cpu_backend(self._config, 0, graph_bytes=1 << 30), own=place.record, peers=self._records,
            transport=HeldTransport(self._channels, 0, self._line), runtime=InlineRuntime(), tasks=self._tasks,
            max_in_flight=1, timing=PATIENT, poll_seconds=0.0,
        )  # fmt: skip
        await place.serve(worker.averager)
        worker.start()
        await asyncio.sleep(0)
        # It downloads the state of the other workers, if there are any.
        await worker.averager.join()
        worker.stage.admission.open()
        return worker

    def _records(self, stage: int) -> list[PeerRecord]:
        return [place.record for place in self._places.values()]

    def _all_open(self) -> bool:
        return not any(worker.weights.round.closed for worker in self.workers)

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(ROUND_SECONDS):
                while not condition():  # noqa: ASYNC110 - what is waited for is spread over the workers
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise DeadlineExceeded(f"round {self.round} is not {what} after {ROUND_SECONDS:.0f} s") from None
