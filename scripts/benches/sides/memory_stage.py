"""A process with one member of a middle stage, or with a last stage, that measures its own memory.

All but the stages before and after is that of a peer. Two rounds are trained, and the second one is measured. Writes
`NUMBER.json` to FOLDER. With `loss` it is a last stage, which trains one microbatch.
"""

import asyncio
import gc
import itertools
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import cast

import torch

from peers.shared import process
from scripts.benches.shared.common import all_there, cpu_backend, run_of, write_json
from scripts.benches.shared.proc import forget_peak, peak_bytes, resident_bytes
from scripts.benches.sides.worker import PATIENT, HeldTransport, Place, Worker
from swarm import config as configs
from swarm.config import RunConfig
from swarm.credentials.identity import generate
from swarm.hop.answers import HopListener, HopReply, Tensors
from swarm.hop.hop import Hop
from swarm.rpc.ask import Stream
from swarm.rpc.channels import ChannelPool
from swarm.stage.boundary import GRADIENT, HIDDEN, TOKENS, request_specs
from swarm.stage.runtime import Runtime
from swarm.training.samples import Microbatch
from swarm.types import Block, PeerId, PeerRecord

STAGE, LAST_STAGE = 1, 1  # The stage in the middle of three, and the last one of two
MEMBERS = 2
WAVES = 3  # In a round a member trains this many times IN_FLIGHT microbatches
POLL_SECONDS = 0.001
SETTLE_SECONDS = 1.0  # Time to wait after a round, because its calls end a little later than the round


class Answer(HopReply):
    """A call that no caller waits for."""

    async def ack(self) -> None:
        pass

    def close(self) -> None:
        pass


class NextStage(Hop):
    """Stands in for the next stage. When told to, it answers the oldest call with random gradients."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.num_waiting = 0
        self._passes = asyncio.Semaphore(0)

    @property
    def is_held_up(self) -> bool:
        return False

    def answer_one(self) -> None:
        self._passes.release()

    async def train(
        self, microbatch: Microbatch, tensors: Tensors, listener: HopListener, hints: Mapping[Block, PeerId]
    ) -> HopReply:
        self.num_waiting += 1
        try:
            await self._passes.acquire()
        finally:
            self.num_waiting -= 1
        gradient_BTD = 1e-3 * torch.randn_like(tensors[HIDDEN])
        return Answer(
            loss=0.0, tensors={GRADIENT: gradient_BTD}, route={}, num_reroutes=0, num_busy=0,
            _call=cast(Stream, None),  # Nobody acknowledges, so nothing is called.
        )  # fmt: skip


class Member:
    def __init__(
        self, config: RunConfig, number: int, *, graph_bytes: int, num_in_flight: int, records: list[PeerRecord],
        transport: HeldTransport, tasks: asyncio.TaskGroup,
    ) -> None:  # fmt: skip
        self._config = config
        self._number = number
        self._num_in_flight = num_in_flight
        self._transport = transport
        self._tasks = tasks
        self.runtime = Runtime(queue_capacity=64)
        self._next = NextStage(Block(STAGE + 1))
        self.worker = Worker(
            config, cpu_backend(config, STAGE, graph_bytes=graph_bytes), own=records[number],
            peers=lambda block: [record for record in records if record.block == block], transport=transport,
            runtime=self.runtime, tasks=tasks, hop=self._next, max_in_flight=2 * num_in_flight, timing=PATIENT,
            poll_seconds=POLL_SECONDS,
        )  # fmt: skip
        self._weights = self.worker.weights
        self.worker.stage.admission.open()
        self._microbatches: deque[asyncio.Task[None]] = deque()
        """The microbatches that wait for their gradients, oldest first."""
        self._indices = itertools.count(number, MEMBERS)
        self._figures: dict[str, int] = {}

    async def measure(self, baseline_bytes: int) -> dict[str, int]:
        """Train two rounds. Return the bytes beyond the baseline in the second one."""
        await self._train_round()
        forget_peak()
        await self._train_round()
        while self._microbatches:
            await self._finish_one()
        await asyncio.sleep(SETTLE_SECONDS)
        self._figures["after_round"] = before_bytes = resident_bytes()
        snapshot = await self.worker.member.snapshot()
        with_snapshot_bytes = resident_bytes()
        del snapshot
        return {
            **{name: value - baseline_bytes for name, value in self._figures.items() if name != "weights"},
            "weights": self._figures["weights"],
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
            if finished == self._num_in_flight + 1:
                # A sum of gradients has begun, whether or not an inner step has used up the former one.
                self._figures["weights"] = tensor_bytes(self._weights)
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
        inputs, size = random_inputs(self._config), self._config.data.microbatch_size
        work = self.worker.train(next(self._indices), inputs, size)
        self._microbatches.append(self._tasks.create_task(work))
        while self._next.num_waiting < len(self._microbatches):  # noqa: ASYNC110 - computed by a thread
            await asyncio.sleep(POLL_SECONDS)

    async def _finish_one(self) -> None:
        self._next.answer_one()
        await self._microbatches.popleft()


def tensor_bytes(root: object) -> int:
    """The bytes of all tensors that an object holds, itself or by others."""
    storages, seen, waiting = dict[int, int](), set[int](), [root]
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, type | FunctionType | ModuleType):
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
        else:
            waiting += gc.get_referents(found)
    return sum(storages.values())


def random_inputs(config: RunConfig) -> dict[str, torch.Tensor]:
    specs = request_specs(config, STAGE)
    return {TOKENS: torch.zeros(specs[TOKENS].shape, dtype=torch.int32), HIDDEN: torch.randn(specs[HIDDEN].shape)}


def warm_up() -> None:
    """Compute a first gradient, so that the memory that torch takes for it does not count for the stage."""
    config = run_of(
        "memory", width=64, layers=2, head_width=32, setting="diloco", length=32, microbatch=2, round_samples=2,
        rounds={"inner_batch_samples": 2},
    )  # fmt: skip
    backend = cpu_backend(config, 0, graph_bytes=1 << 30)
    _, _, accumulated = backend.forward_loss(0, 0, {TOKENS: torch.zeros(2, 33, dtype=torch.int32)}, accumulate=True)
    assert accumulated is not None
    backend.settle(accumulated)


async def run_member(folder: Path, number: int, graph_bytes: int, num_in_flight: int) -> None:
    torch.set_num_threads(1)
    config = configs.load(folder / "run.toml")
    channels, place = ChannelPool(), Place(generate(), STAGE)
    records = await place.meet(folder, number, MEMBERS)
    # The averager asks these peers at the other stages.
    neighbour = place.record.model_copy(update={"peer_id": generate().peer_id})
    records += [neighbour.model_copy(update={"stage": stage}) for stage in (STAGE - 1, STAGE + 1)]
    warm_up()
    baseline_bytes = resident_bytes()
    async with asyncio.TaskGroup() as tasks:
        member = Member(
            config, number, graph_bytes=graph_bytes, num_in_flight=num_in_flight, records=records,
            transport=HeldTransport(channels, STAGE, asyncio.Event()), tasks=tasks,
        )  # fmt: skip
        await place.serve(member.worker.averager)
        member.runtime.start()
        member.worker.start()
        figures = await member.measure(baseline_bytes)
        write_json(folder / f"{number}.json", {**figures, "baseline": baseline_bytes})
        await all_there(folder / f"{member}.json" for member in range(MEMBERS))
        member.worker.stop()
    member.runtime.stop(PATIENT.average_seconds)
    await place.close()
    await channels.close()


def measure_loss(config: RunConfig) -> dict[str, float]:
    """Train one microbatch at a last stage. Return the peak bytes beyond what the stage holds, and the loss."""
    backend = cpu_backend(config, LAST_STAGE, graph_bytes=0)
    specs = request_specs(config, LAST_STAGE)
    tokens_BT1 = torch.randint(config.model.vocab_size, specs[TOKENS].shape, dtype=torch.int32)
    inputs = {TOKENS: tokens_BT1, HIDDEN: torch.randn(specs[HIDDEN].shape)}
    before_bytes = resident_bytes()
    forget_peak()
    loss, _, _ = backend.forward_loss(0, 0, inputs, accumulate=True)
    return {"peak": peak_bytes() - before_bytes, "loss": loss}


def main(folder: Path, number: int, graphs: str, num_in_flight: int = 0) -> None:
    if graphs != "loss":
        process.keep_freed_memory()
        asyncio.run(run_member(folder, number, int(graphs), num_in_flight))
    else:
        torch.set_num_threads(1)
        warm_up()
        write_json(folder / f"{number}.json", measure_loss(configs.load(folder / "run.toml")))
