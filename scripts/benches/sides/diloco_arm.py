"""The arms that the bench `diloco` compares, and a process that trains one of them with one seed.

Every arm sees the same samples in the same order. The length of a run is given as the outer steps of the arm with H =
200, which has the fewest. The last line of stdout is one JSON object.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from peers.shared import logs, process
from scripts.benches.shared.common import cpu_backend, run_of, with_corpus
from scripts.benches.sides.reference import HeldOut, Reference, is_point
from scripts.benches.sides.worker import PATIENT, HeldTransport, Place, Worker
from swarm.config import RunConfig
from swarm.credentials.identity import generate
from swarm.data.microbatches import Microbatches
from swarm.errors import DeadlineExceeded, IntegrityError
from swarm.rpc.channels import ChannelPool
from swarm.stage.boundary import TOKENS
from swarm.stage.runtime import Priority, Runtime
from swarm.types import Block, PeerRecord

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
        assert not any(worker.weights.buckets.num_samples for worker in self.workers), "inner steps go on meanwhile"

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

    def _records(self, block: Block) -> list[PeerRecord]:
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


NUM_WORKERS = 2
INNER_BATCH_SAMPLES = 16
"""The samples of a microbatch, which are also the samples of one worker's inner step."""
LONGEST_ROUND = 200  # Inner steps a worker and round of the arm with the fewest rounds
LEARNING_RATES = {"single": 5e-3, "synchronous": 5e-3, "diloco": 8e-3}
OUTER = {"learning_rate": 0.7, "momentum": 0.8}  # The best rate and momentum that a short search found
SHORT_ROUNDS_RATE = 5e-3
SHORT_ROUNDS_OUTER = {"learning_rate": 0.7, "momentum": 0.5}
"""The outer optimizer with H = 10. There pseudo-gradients are more alike from round to round, and a longer momentum
would add up too many of them."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train, with H inner steps of each worker in a round. With `churn` one of the workers is killed in
    every other round, and a fresh one takes its place. `changes` are those of the common configuration, by section."""

    kind: Literal["single", "synchronous", "diloco"] = "diloco"
    inner_steps: int = 50
    num_workers: int = NUM_WORKERS
    learning_rate: float | None = None
    churn: bool = False
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


SPARSE = {"codec": "topk", "top_k": 112, "values": "2bit", "indices": "elias-fano", "feedback_decay": 0.99}
DCT = {"codec": "dct-topk", "top_k": 64, "values": "lut8", "indices": "12bit", "feedback_decay": 0.95}
NO_MOMENTUM = {"learning_rate": 1.0, "momentum": 0.0}  # For codecs with error feedback, which replaces momentum

ARMS: Mapping[str, Arm] = {
    "single": Arm(kind="single", inner_steps=1),
    "synchronous": Arm(kind="synchronous", inner_steps=1),
    "h10": Arm(inner_steps=10, learning_rate=SHORT_ROUNDS_RATE, changes={"outer": SHORT_ROUNDS_OUTER}),
    "h50": Arm(),
    "h200": Arm(inner_steps=LONGEST_ROUND),
    "int8": Arm(changes={"averaging": {"codec": "int8"}}),
    "int4": Arm(changes={"averaging": {"codec": "int4"}}),
    "dct-topk": Arm(changes={"averaging": DCT, "outer": NO_MOMENTUM}),
    "overlap": Arm(changes={"averaging": {"overlap_steps": 5}}),
    "four": Arm(num_workers=4),
    "churn": Arm(num_workers=4, churn=True),
    "int8-h10": Arm(
        inner_steps=10,
        learning_rate=SHORT_ROUNDS_RATE,
        changes={"averaging": {"codec": "int8"}, "outer": SHORT_ROUNDS_OUTER},
    ),
    "sparse-h10": Arm(
        inner_steps=10, learning_rate=SHORT_ROUNDS_RATE, changes={"averaging": SPARSE, "outer": NO_MOMENTUM}
    ),
}


def total_samples(rounds_at_200: int) -> int:
    return rounds_at_200 * LONGEST_ROUND * NUM_WORKERS * INNER_BATCH_SAMPLES


def num_rounds(config: RunConfig, rounds_at_200: int) -> int:
    """Outer steps of an arm with that configuration; optimizer steps in the synchronous setting."""
    return total_samples(rounds_at_200) // config.rounds.round_samples


def run_config(arm: Arm, *, seed: int, rounds_at_200: int, dataset: str) -> RunConfig:
    """The run that an arm trains. Raises ValueError."""
    samples = total_samples(rounds_at_200)
    optimizer = {
        "learning_rate": arm.learning_rate or LEARNING_RATES[arm.kind], "schedule": "cosine", "total_samples": samples,
        "warmup_samples": samples // 50,
    }  # fmt: skip
    more: dict[str, Mapping[str, Any]] = {"outer": OUTER, "averaging": {"overlap_steps": 0}}
    more |= {section: {**more[section], **changes} for section, changes in arm.changes.items()}
    return run_of(
        "diloco", width=32, layers=2, head_width=16, setting="diloco" if arm.kind == "diloco" else "synchronous",
        length=32, microbatch=INNER_BATCH_SAMPLES,
        round_samples=arm.num_workers * arm.inner_steps * INNER_BATCH_SAMPLES, dataset=dataset,
        data={"seed": seed, "held_out_fraction": 0.02}, rounds={"inner_batch_samples": INNER_BATCH_SAMPLES},
        optimizer=optimizer, outer=more["outer"], averaging=more["averaging"],
    )  # fmt: skip


CURVE_POINTS = 5


@dataclass(eq=False)
class Curve:
    """Held-out losses during training, and at its end."""

    config: RunConfig
    data: Microbatches
    num_rounds: int
    points: list[tuple[int, float]] = field(default_factory=list)  # Tokens, and nats a token

    def __post_init__(self) -> None:
        self._held_out = HeldOut(self.config, self.data)

    def after_round(self, number: int, weights: Mapping[str, torch.Tensor]) -> None:
        if is_point(number, self.num_rounds, CURVE_POINTS):
            tokens = (number + 1) * self.config.rounds.round_samples * self.config.data.sequence_length
            self.points.append((tokens, self._held_out.loss(weights)))


def train(arm: Arm, config: RunConfig, data: Microbatches, rounds: int) -> dict[str, Any]:
    started_at = time.perf_counter()
    curve = Curve(config, data, rounds)
    averaging = _train_single(config, data, curve) if arm.kind == "single" else asyncio.run(_train(arm, curve))
    tokens, val_loss = curve.points[-1]
    return {
        "val_loss": val_loss, "outer_steps": rounds, "tokens": tokens, **averaging, "curve": curve.points,
        "seconds": time.perf_counter() - started_at,
    }  # fmt: skip


def _train_single(config: RunConfig, data: Microbatches, curve: Curve) -> dict[str, Any]:
    reference = Reference(config, data)
    for number in range(curve.num_rounds):
        reference.step(number)
        curve.after_round(number, reference.weights)
    return {"bytes_per_peer": 0, "compression_ratio": 1.0, "lost_tokens": 0, "attempts": 0}


async def _train(arm: Arm, curve: Curve) -> dict[str, Any]:
    ratios: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        swarm = DrivenSwarm(curve.config, curve.data, tasks)
        await swarm.start(arm.num_workers)
        for number in range(curve.num_rounds):
            # A different worker is replaced each time, so that sometimes the leader is replaced.
            await swarm.train_round(replaced=number // 2 % arm.num_workers if arm.churn and number % 2 else None)
            curve.after_round(number, swarm.anchor)
            ratios.append(swarm.workers[0].member.reports[-1].compression_ratio)
        await swarm.stop()
    return {
        "bytes_per_peer": swarm.bytes_averaged // arm.num_workers, "compression_ratio": sum(ratios) / len(ratios),
        "lost_tokens": swarm.num_lost_samples * curve.config.data.sequence_length, "attempts": swarm.num_attempts,
    }  # fmt: skip


def main(name: str, seed: int, rounds_at_200: int, dataset: str) -> None:
    process.prepare_environment()
    torch.set_num_threads(1)
    logs.setup_logging(f"bench diloco {name}", "warning")
    arm = ARMS[name]
    config, data = with_corpus(run_config(arm, seed=seed, rounds_at_200=rounds_at_200, dataset=dataset))
    print(json.dumps(train(arm, config, data, num_rounds(config, rounds_at_200))))
