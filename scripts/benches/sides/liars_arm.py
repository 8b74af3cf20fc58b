"""Eight workers in one process that train and average, of which some lie, for the bench `liars`.

A lie is told on this side only: in the contribution that a worker's stage closes, or in the text that it trains on. The
last line of stdout is one JSON object.
"""

import asyncio
import dataclasses
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from peers.shared import logs, process
from scripts.benches.shared.common import run_of, with_corpus
from scripts.benches.sides import mixed_processors
from scripts.benches.sides.diloco_arm import DrivenSwarm
from scripts.benches.sides.reference import HeldOut
from scripts.benches.sides.worker import PATIENT, Worker
from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches
from swarm.errors import DeadlineExceeded, IntegrityError, SwarmError
from swarm.honesty.comparison import Comparison
from swarm.stage.boundary import TOKENS
from swarm.training.round_member import Contribution

NUM_WORKERS, LIARS = 8, (2, 5)
INNER_STEPS = 6
MICROBATCH = 8
MICROBATCHES_EACH = 3
"""Microbatches of each worker in a synchronous round."""
HONEST_ROUNDS = 8
"""Rounds before the lies begin."""
ROUND_SECONDS = 300.0
FLIPPED_LAYER = "layers.1."
QUICK = dataclasses.replace(PATIENT, exclusion_seconds=0.02, max_exclusion_seconds=0.1)
"""Who is left out comes back at once, so that it lies in each round."""
Vectors = Mapping[str, torch.Tensor]
Lie = Callable[[Vectors, Vectors | None, int], Vectors]
"""Makes another contribution of the true one, of that of the round before, and of the round's number."""


def _random(true: Vectors, _: Vectors | None, number: int) -> Vectors:
    generator = torch.Generator().manual_seed(number)
    drawn = {name: torch.randn(value.shape, generator=generator) for name, value in true.items()}
    return {name: drawn[name] * (value.norm() / drawn[name].norm().clamp_min(1e-30)) for name, value in true.items()}


def _one_layer(true: Vectors, _: Vectors | None, __: int) -> Vectors:
    return {name: -value if name.startswith(FLIPPED_LAYER) else value for name, value in true.items()}


CONTRIBUTIONS: Mapping[str, Lie] = {
    "zeros": lambda true, _, __: {name: torch.zeros_like(value) for name, value in true.items()},
    "sign": lambda true, _, __: {name: -value for name, value in true.items()},
    "scaled": lambda true, _, __: {name: 3.0 * value for name, value in true.items()},
    "random": _random,
    "yesterday": lambda true, before, _: before or true,
    "one-layer": _one_layer,
}  # fmt: skip
TEXTS = ("other-microbatch", "labels", "one-in-ten")
"""Lies in what is trained on: another microbatch's text under this one's name, tokens in a random order, so that labels
do not follow from inputs, and that for one microbatch in ten."""
WAYS = (*CONTRIBUTIONS, *TEXTS)
HONEST, CHURN, MIXED = "honest", "churn", "mixed"
"""Nobody lies. With churn every third round a worker is killed and replaced; with mixed processors too, but without a
network."""


class LyingMember:
    """Stands between a worker's stage and its averager, and lies from some round on."""

    def __init__(self, worker: Worker, lie: Lie, first_round: int) -> None:
        self._close = worker.member.close
        self._lie = lie
        self._first_round = first_round
        self._told: tuple[Contribution, Contribution] | None = None
        self._before: Vectors | None = None
        self._round = -1
        self._true: Vectors = {}
        worker.member.close = self.close  # type: ignore[method-assign]

    async def close(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        true = await self._close(round_number, drop=drop)
        if self._told is None or self._told[0] is not true:
            if round_number != self._round:
                self._round, self._before = round_number, self._true or None
            self._true = {name: tensor.clone() for name, tensor in true.tensors.items()}
            is_lie = round_number >= self._first_round and true.num_samples
            tensors = self._lie(self._true, self._before, round_number) if is_lie else true.tensors
            self._told = true, dataclasses.replace(true, tensors=tensors)
        return self._told[1]


class LiarsSwarm(DrivenSwarm):
    """Workers of which some lie."""

    timing = QUICK

    def __init__(self, config: RunConfig, data: Microbatches, tasks: asyncio.TaskGroup, way: str) -> None:
        super().__init__(config, data, tasks)
        self._way = way
        self._generator = torch.Generator().manual_seed(0)
        self._num_fed = 0

    async def start(self, num_workers: int) -> None:
        await super().start(num_workers)
        if self._way in CONTRIBUTIONS:
            for number in LIARS:
                LyingMember(self.workers[number], CONTRIBUTIONS[self._way], HONEST_ROUNDS)

    async def train_round(self, replaced: int | None = None) -> None:
        """Train until all workers have committed the round, whoever is left out of it. A worker may be killed in the
        middle, and replaced. Raises DeadlineExceeded, and IntegrityError if the workers hold different states."""
        number, half = self.round, self._config.rounds.round_samples // 2
        turn, fed = 0, set[int]()
        async with asyncio.timeout(ROUND_SECONDS):
            while any(worker.weights.round.number <= number for worker in self.workers):
                worker = self.workers[turn % NUM_WORKERS]
                turn += 1
                view = self._leading().averager.view()
                if replaced is not None and sum(p.num_samples for p in view.progress.values()) >= half:
                    await self._replace(replaced)
                    replaced = None
                is_open = not worker.weights.round.closed and worker.weights.round.number == number
                if view.round == number and not view.complete and is_open:
                    await self._feed_one(worker, number, fed, view.committed, view.quiet_seconds)
                else:
                    await asyncio.sleep(0.001)
        digests = {await worker.member.state_digest() for worker in self.workers}
        if len(digests) > 1:
            raise IntegrityError(f"after round {number} the workers hold different states")

    def _leading(self) -> Worker:
        return next((worker for worker in self.workers if worker.averager.leads), self.workers[0])

    async def _feed_one(
        self, worker: Worker, number: int, fed: set[int], committed: Collection[int], quiet_seconds: float
    ) -> None:
        if not self._config.rounds.synchronous:
            # Each takes whole inner batches, as long as the others do.
            await self._lying_train(worker, next(self._indices))
            return
        wanted = self._config.microbatches_of(number, worker.record.block)
        fresh = next((index for index in wanted if index not in fed), None)
        if fresh is None and quiet_seconds > 0.02:
            # Something was lost with a worker that is gone or left out: it is run again, at another one.
            fresh = next((index for index in wanted if index not in committed), None)
        if fresh is None or fresh in worker.member.progress().committed:
            await asyncio.sleep(0.001)
            return
        fed.add(fresh)
        await self._lying_train(worker, fresh)

    async def _lying_train(self, worker: Worker, index: int) -> None:
        lies = worker in [self.workers[number] for number in LIARS] and self.round >= HONEST_ROUNDS
        self._num_fed += 1
        source = index + 7 * self._config.microbatches_per_round if lies and self._way == "other-microbatch" else index
        tokens = torch.from_numpy(self._data.tokens(source))
        if lies and (self._way == "labels" or (self._way == "one-in-ten" and self._num_fed % 10 == 0)):
            order = torch.rand(tokens.shape, generator=self._generator).argsort(dim=1)
            tokens = tokens.gather(1, order)
        try:
            await worker.train(index, {TOKENS: tokens}, len(tokens))
        except SwarmError:
            await asyncio.sleep(0.002)  # Its round has just closed.


def run_config(setting: str, dataset: str, codec: str, seed: int) -> RunConfig:
    is_synchronous = setting == "synchronous"
    steps = MICROBATCHES_EACH if is_synchronous else INNER_STEPS
    return run_of(
        "liars", width=64, layers=3, head_width=32, setting=setting, length=32, microbatch=MICROBATCH,
        round_samples=NUM_WORKERS * steps * MICROBATCH, dataset=dataset, data={"seed": seed, "held_out_fraction": 0.02},
        rounds={} if is_synchronous else {"inner_batch_samples": MICROBATCH},
        optimizer={"learning_rate": 3e-3, "schedule": "constant", "warmup_samples": 64},
        averaging={"codec": codec, **({} if is_synchronous else {"overlap_steps": 0})},
    )  # fmt: skip


class Findings(logging.Handler):
    """Counts which comparison found a liar, from what the product says in its log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "swarm.honesty.suspects" and " is out of line: " in record.getMessage():
            self.lines.add(record.getMessage())

    @property
    def by_kind(self) -> Mapping[str, int]:
        kinds = {"its norm": "norm", "its cosine": "direction", "gave before": "repeated"}
        counts = Counter(kind for line in self.lines for text, kind in kinds.items() if text in line)
        return {**counts, "in_one_layer": sum(" in layers." in line for line in self.lines)}


async def train(config: RunConfig, data: Microbatches, way: str, num_rounds: int) -> dict[str, Any]:
    findings, comparing = Findings(), [0.0]
    logging.getLogger("swarm.honesty.suspects").addHandler(findings)
    compare = Comparison.deviations

    def timed(self: Comparison, parts: Mapping[str, torch.Tensor]) -> Any:
        began = time.thread_time()
        found = compare(self, parts)
        comparing[0] += time.thread_time() - began
        return found

    Comparison.deviations = timed  # type: ignore[method-assign]
    named_at, named_by = dict[str, int](), dict[str, str]()
    async with asyncio.TaskGroup() as tasks:
        swarm = LiarsSwarm(config, data, tasks, way)
        await swarm.start(NUM_WORKERS)
        began, cpu = time.perf_counter(), time.process_time()
        for number in range(num_rounds):
            replaced = number // 3 % NUM_WORKERS if way == CHURN and number % 3 == 2 else None
            try:
                await swarm.train_round(replaced)
            except TimeoutError:
                raise DeadlineExceeded(f"{way}: round {number} took longer than {ROUND_SECONDS:.0f} s") from None
            for line in swarm.workers[0].averager.counters().refusals:
                # Other lines name nobody: among few members nobody can say who is wrong.
                peer, is_naming, _ = line.partition(" lies: ")
                if is_naming:
                    named_at.setdefault(peer, number)
                    named_by.setdefault(peer, line)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        liars = {swarm.workers[number].record.peer_id for number in LIARS} if way in WAYS else set()
        loss = HeldOut(config, data).loss(swarm.anchor)
        await swarm.stop()
    return {
        "caught": sum(named_at.get(peer, 1 << 30) < HONEST_ROUNDS + 5 for peer in liars) / max(1, len(liars)),
        "named": sum(peer in named_at for peer in liars), "falsely_named": len(named_at.keys() - liars),
        "left_out": len({line.split(" is out")[0] for line in findings.lines}), "found_by": findings.by_kind,
        "false_lines": [line for peer, line in named_by.items() if peer not in liars],
        "held_out_loss": loss, "rounds": num_rounds, "overhead": comparing[0] / cpu, "seconds": seconds,
    }  # fmt: skip


def main(way: str, setting: str, num_rounds: int, dataset: str, codec: str, seed: int) -> None:
    process.prepare_environment()
    torch.set_num_threads(1)
    logs.setup_logging(f"bench liars {setting} {way}", "warning")
    logging.getLogger("swarm").setLevel(logging.ERROR)
    logging.getLogger("swarm.honesty.suspects").setLevel(logging.WARNING)
    config, data = with_corpus(run_config(setting, dataset, codec, seed))
    if way == MIXED:
        each = MICROBATCHES_EACH if config.rounds.synchronous else INNER_STEPS
        with mixed_processors.other_kind(setting, dataset, codec, seed) as other:
            print(json.dumps(mixed_processors.train(config, data, other, (NUM_WORKERS, each), num_rounds)))
    else:
        print(json.dumps(asyncio.run(train(config, data, way, num_rounds))))
