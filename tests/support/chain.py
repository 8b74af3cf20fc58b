"""A whole pipeline in one process. Every peer has a real gRPC server on the loopback, a compute thread and a hop.

For tests that involve several stages. The test gives records to the routers, and ends the rounds.
"""

import asyncio
import dataclasses
import functools
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing, suppress
from functools import partial

import grpc
import pytest
import torch

from swarm.config import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    OuterConfig,
    RoundsConfig,
    RunConfig,
    StagesConfig,
    WireConfig,
)
from swarm.hop.answers import HopListener, HopReply
from swarm.hop.calls import EncodingsIn
from swarm.hop.hop import Hop
from swarm.hop.retries import HopContext, HopLimits
from swarm.machine.clock import Clock, SystemClock
from swarm.machine.recording import Recorder, recorder_of
from swarm.model.masks import DropoutKey
from swarm.model.stages import build_stage, build_transformer
from swarm.routing.peer_queue import NOBODY
from swarm.routing.router import Router
from swarm.rpc.callers import Callers
from swarm.rpc.channels import ChannelPool
from swarm.rpc.local import LocalBlock
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from swarm.rpc.wire import NewBytes, add_stage_servicer, new_bytes
from swarm.stage.backend import StageBackend
from swarm.stage.boundary import TOKENS
from swarm.stage.context import StageContext, StageLimits
from swarm.stage.generation import GenerationServicer, SessionLimits
from swarm.stage.graphs import GraphBudget
from swarm.stage.ledger import EntryState
from swarm.stage.runtime import Runtime
from swarm.stage.servicer import StageServicer
from swarm.stage.spot_check import SpotCheck
from swarm.stage.stage import Stage, weights_of
from swarm.stage.staging import staging_of
from swarm.training import samples
from swarm.training.samples import Microbatch
from swarm.types import TRAINER_STAGE, Block, PeerId, PeerRecord, PeerState
from tests.support.partial import partial_samples

PATIENCE_SECONDS = 20.0  # How long a test waits for something before it fails
SUM_TOLERANCE = 2e-4  # The tolerance for a sum over all targets
GRAPH_BYTES = 1 << 30  # What a peer's autograd graphs may take. They never take so much.
ORPHAN_SECONDS = 10.0  # How long an answer waits for a retry, by the stages' clock

SYNCHRONOUS = RunConfig(
    model=ModelConfig(num_layers=3, d_model=32, num_heads=2, vocab_size=64),
    stages=StagesConfig(num_stages=3),
    data=DataConfig(sequence_length=16, microbatch_size=2),
    rounds=RoundsConfig(setting="synchronous", round_samples=16),
    optimizer=OptimizerConfig(learning_rate=0.01, warmup_samples=0, weight_decay=0.1, clip_norm=1.0),
)
DILOCO = dataclasses.replace(
    SYNCHRONOUS,
    rounds=RoundsConfig(setting="diloco", round_samples=16, inner_batch_samples=16),
    outer=OuterConfig(learning_rate=0.7, momentum=0.9),
)
LORA = dataclasses.replace(SYNCHRONOUS, lora=LoraConfig(rank=4, dropout=0.2))
DROPOUT = dataclasses.replace(SYNCHRONOUS, model=dataclasses.replace(SYNCHRONOUS.model, dropout=0.2))
INT8 = dataclasses.replace(SYNCHRONOUS, wire=WireConfig(dtype="int8"))

BOTH = pytest.mark.parametrize("config", [SYNCHRONOUS, DILOCO], ids=["synchronous", "diloco"])
"""For tests of both settings."""
ANY_HOP = pytest.mark.usefixtures("hops")
"""For tests that hold for hops between processes, and for those within one."""


def tokens(config: RunConfig, microbatch: int) -> torch.Tensor:
    """A microbatch's tokens (B, T + 1): a function of its index."""
    shape = (config.data.microbatch_size, config.data.sequence_length + 1)
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randint(config.model.vocab_size, shape, generator=generator, dtype=torch.int32)


def samples_of(config: RunConfig, microbatch: int) -> dict[str, torch.Tensor]:
    """All tensors of a microbatch that travel. In a run on conversations few tokens are targets."""
    if config.data.has_targets:
        return partial_samples(config, microbatch)
    return {TOKENS: tokens(config, microbatch)}


def reference(config: RunConfig, microbatches: Sequence[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the gradient summed over all targets, in one process with the initial weights."""
    losses, gradients = _reference(config, tuple(microbatches))
    return list(losses), dict(gradients)


@functools.lru_cache(maxsize=16)
def _reference(config: RunConfig, microbatches: tuple[int, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Many tests compare with the same few."""
    model = build_transformer(config, device="cpu")
    losses = []
    for microbatch in microbatches:
        batch, key = samples_of(config, microbatch), DropoutKey(seed=config.data.seed, microbatch=microbatch)
        loss = model.summed_loss(batch, key)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        losses.append(float(loss.detach()) / max(1, samples.amount(batch).targets))
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor], tolerance: float) -> None:
    """Assert that the names are the same, and that values differ by `tolerance` at most."""
    assert left.keys() == right.keys()
    for name in left:
        difference = float((left[name].detach() - right[name].detach()).abs().max())
        assert difference <= tolerance, f"{name} differs by {difference}"


async def eventually(condition: Callable[[], bool], *, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait until `condition` is true. Until then, call `meanwhile` again and again."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            meanwhile()
            await asyncio.sleep(0.005)


def failures_of(*routers: Router) -> list[PeerId]:
    """The list of peers whose failures are reported to these routers from now on."""
    failures: list[PeerId] = []
    for router in routers:
        router.failed = lambda peer_id, **_: failures.append(peer_id)  # type: ignore[method-assign]
    return failures


@asynccontextmanager
async def held(runtime: Runtime) -> AsyncIterator[None]:
    """Inside the block, keep a compute thread from running any task."""
    started, release = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert release.wait(2 * PATIENCE_SECONDS)

    waiting = asyncio.create_task(runtime.control(wait))
    await eventually(started.is_set)
    try:
        yield
    finally:
        release.set()
        await waiting


@dataclasses.dataclass
class Spans:
    """Whether a chain's peers of several stages are one process unless its test says so."""

    by_default: bool = False


SPANS = Spans()


@dataclasses.dataclass
class Process:
    """A process that serves one block, or a block of each stage."""

    blocks: dict[str, LocalBlock] = dataclasses.field(default_factory=dict)
    """Its blocks, by the ids of their peers."""

    def block(self, record: PeerRecord) -> LocalBlock | None:
        return self.blocks.get(record.peer_id)


class Peer:
    def __init__(
        self, *, config: RunConfig, number: int, stage: int, clock: Clock, tasks: asyncio.TaskGroup,
        hop_clock: Clock, stage_limits: StageLimits, hop_limits: HopLimits, graph_bytes: int, device: str,
        session_limits: SessionLimits, recorder: Recorder | None, runtime: Runtime, process: Process,
        own_next: PeerId, known: list[PeerRecord], check_share: float,
    ) -> None:  # fmt: skip
        staging = staging_of(torch.device(device))
        module = build_stage(config, stage, device=device)
        self.peer_id = PeerId(f"{number:040x}")
        self.weights = weights_of(config, module, lineage="")
        self.backend = StageBackend(
            config=config, stage=stage, module=module, weights=self.weights, staging=staging,
            budget=GraphBudget(limit_bytes=graph_bytes), recorder=recorder,
        )  # fmt: skip
        self.runtime = runtime
        self.router, self.channels, self.hop = _hop(
            config, stage, hop_clock, hop_limits, staging.host_bytes, own=process.block, own_id=own_next,
            check_share=check_share, encodings_in=lambda number: self.backend.boundary_in(number).encodings,
        )  # fmt: skip
        last = stage == config.stages.num_stages - 1
        context = StageContext(
            config=config, backend=self.backend, runtime=self.runtime, clock=clock,
            hops={} if last else {self.hop.block: self.hop},
            tasks=tasks, limits=stage_limits,
        )  # fmt: skip
        self.stage = Stage(context)
        self.stage.admission.open()
        self.callers = Callers()
        describe = partial(pb.DescribeReply, run_id=config.run_id, stage=stage)
        self.spot_check = SpotCheck(
            self.stage, channels=self.channels,
            peers=lambda block: [record for record in known if record.block == block],
        )  # fmt: skip
        self.servicer = StageServicer(self.stage, describe=describe, callers=self.callers, spot_check=self.spot_check)
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        add_stage_servicer(self.servicer, self.server)
        self.generation = GenerationServicer(self.stage, session_limits)
        add_GenerationServiceServicer_to_server(self.generation, self.server)
        self.local = LocalBlock(self.servicer, self.generation)
        process.blocks[self.peer_id] = self.local
        tasks.create_task(self.hop.checks.run())
        self.record = PeerRecord(
            peer_id=self.peer_id, stage=stage, announced_at=0.0, state=PeerState.SERVING, samples_per_second=1.0,
            endpoint=f"127.0.0.1:{bind_server(self.server, '127.0.0.1', 0, None)}",
        )  # fmt: skip

    async def start(self) -> None:
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop(0)
        await self.local.stop(0)
        await self.channels.close()

    def held(self) -> AbstractAsyncContextManager[None]:
        """Inside the block, keep the peer's compute thread from running any task."""
        return held(self.runtime)

    @property
    def num_idle(self) -> tuple[int, int, int, int]:
        """What must be (0, 0, 0, 0) when nothing is under way: slots, tentative gradients, versions, graphs in use."""
        return (
            self.stage.admission.num_admitted, self.weights.buckets.open().num_tentative, self.weights.version.users,
            self.backend.budget.num_kept,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Chain:
    """The peers, and a trainer's hop to the first stage."""

    config: RunConfig
    peers: Sequence[Peer]
    trainer: Hop
    router: Router

    def at(self, stage: int) -> list[Peer]:
        return [peer for peer in self.peers if peer.backend.stage == stage]

    def update(self, records: Sequence[PeerRecord]) -> None:
        """Tell all routers which peers serve."""
        for router in [self.router, *(peer.router for peer in self.peers)]:
            for stage in range(self.config.stages.num_stages):
                router.update(Block(stage), [record for record in records if record.stage == stage])

    async def train(
        self, index: int, *, round_number: int = 0, accumulate_only_at: int | None = None,
        hop: Hop | None = None, hints: Mapping[Block, PeerId] | None = None,
    ) -> HopReply:  # fmt: skip
        """Train one microbatch as a trainer does, without acknowledging the answer."""
        microbatch = Microbatch(
            index=index, round=round_number, num_samples=self.config.data.microbatch_size,
            accumulate_only_at=accumulate_only_at,
        )  # fmt: skip
        async with asyncio.timeout(PATIENCE_SECONDS):
            inputs = samples_of(self.config, index)
            return await (hop or self.trainer).train(microbatch, inputs, HopListener(), hints or {})

    async def ack(self, reply: HopReply) -> None:
        """Acknowledge an answer, and wait until that has reached all stages."""
        await reply.ack()
        await eventually(lambda: not any(peer.stage.answers.num_settling for peer in self.peers))

    async def train_all(
        self, indices: Sequence[int], *, round_number: int = 0, accumulate_only_at: int | None = None
    ) -> list[float]:
        """Train and acknowledge several microbatches at the same time. Return the losses."""

        async def one(index: int) -> float:
            reply = await self.train(index, round_number=round_number, accumulate_only_at=accumulate_only_at)
            await self.ack(reply)
            return reply.loss

        return await asyncio.gather(*(one(index) for index in indices))

    async def evaluate(self, batch: Mapping[str, torch.Tensor], *, round_number: int = 0) -> float:
        """The loss of held-out samples on a round's weights."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            with closing(await self.trainer.hold(round_number, HopListener())) as hold:
                return await self.trainer.evaluate(batch, hold.held, HopListener())

    def sums(self) -> dict[str, torch.Tensor]:
        """The accumulated gradients, summed over the peers of each stage, on the CPU."""
        total: dict[str, torch.Tensor] = {}
        for peer in self.peers:
            for name, value in peer.weights.buckets.open().sums.items():
                value = value.to("cpu", copy=True)
                total[name] = total[name] + value if name in total else value
        return total

    def num_samples(self) -> list[int]:
        return [
            sum(peer.weights.buckets.open().num_samples for peer in self.at(stage))
            for stage in range(self.config.stages.num_stages)
        ]

    def counts(self, name: str) -> list[int]:
        """One counter of each peer."""
        return [peer.stage.counters[name] for peer in self.peers]

    def states(self, microbatch: int) -> list[EntryState | None]:
        entries = [peer.stage.ledger.find(microbatch) for peer in self.peers]
        return [None if entry is None else entry.state for entry in entries]

    def assert_accumulated(self, microbatches: Sequence[int]) -> None:
        """Assert that every stage holds each of these microbatches once, and nothing else."""
        assert self.num_samples() == [len(microbatches) * self.config.data.microbatch_size] * 3
        if microbatches:
            assert_close(self.sums(), reference(self.config, microbatches)[1], SUM_TOLERANCE)
        else:
            assert max(float(value.abs().max()) for value in self.sums().values()) < SUM_TOLERANCE

    @property
    def is_idle(self) -> bool:
        return all(peer.num_idle == (0, 0, 0, 0) for peer in self.peers)

    def assert_idle(self) -> None:
        """Assert that no peer has anything under way."""
        assert [peer.num_idle for peer in self.peers] == [(0, 0, 0, 0)] * len(self.peers)

    @asynccontextmanager
    async def another_trainer(self) -> AsyncIterator[Hop]:
        router, channels, hop = _hop(self.config, TRAINER_STAGE, SystemClock(), HopLimits())
        router.update(Block(0), [peer.record for peer in self.at(0)])
        yield hop
        await channels.close()


@asynccontextmanager
async def running_chain(
    config: RunConfig, *, num_peers: Sequence[int] = (1, 1, 1), clock: Clock | None = None,
    hop_clock: Clock | None = None, graph_bytes: int = GRAPH_BYTES, max_in_flight: Sequence[int] = (16, 16, 16),
    hop_limits: HopLimits | None = None, round_wait_seconds: float = 30.0,
    devices: Sequence[str] = ("cpu", "cpu", "cpu"), session_limits: SessionLimits | None = None,
    new_recorder: Callable[[torch.device], Recorder | None] = recorder_of, warms_up: bool = False,
    spans: bool | None = None, one_thread: bool = False, check_share: float = 0.0,
) -> AsyncIterator[Chain]:  # fmt: skip
    """Start `num_peers` peers at each stage; `clock` is the stages', `hop_clock` that of routers and hops.

    Args:
        devices: the device of each stage's peers.
        new_recorder: makes the recorder of a peer.
        warms_up: whether peers warm up, and so record their stage.
        spans: whether the first peers of all stages are one process, and so are the second ones, and so on. Left out,
            the fixture `hops` says it.
        one_thread: whether all peers have one compute thread.
        check_share: the share of answers that other peers check.
    """
    hop_limits = hop_limits or HopLimits(retry_seconds=0.02)
    spans = SPANS.by_default if spans is None else spans
    stages = [stage for stage, count in enumerate(num_peers) for _ in range(count)]
    columns = [column for count in num_peers for column in range(count)]
    processes = [Process() for _ in stages]
    runtimes = [
        Runtime(
            queue_capacity=64, name=f"compute-{number}", stopwatch=staging_of(torch.device(devices[stage])).stopwatch
        )
        for number, stage in enumerate(stages)
    ]
    async with AsyncExitStack() as stack:
        tasks, known = await stack.enter_async_context(cancelled_tasks()), list[PeerRecord]()
        peers = [
            Peer(
                config=config, number=number, stage=stage, clock=clock or SystemClock(), tasks=tasks,
                hop_clock=hop_clock or SystemClock(),
                stage_limits=StageLimits(
                    max_in_flight=max_in_flight[stage], orphan_seconds=ORPHAN_SECONDS,
                    round_wait_seconds=round_wait_seconds,
                ),
                hop_limits=hop_limits, graph_bytes=graph_bytes, device=devices[stage],
                session_limits=session_limits or SessionLimits(),
                recorder=new_recorder(torch.device(devices[stage])),
                runtime=runtimes[0 if one_thread else number], process=processes[columns[number] if spans else number],
                known=known, check_share=check_share,
                own_next=PeerId(f"{sum(num_peers[: stage + 1]) + columns[number]:040x}") if spans else NOBODY,
            )
            for number, stage in enumerate(stages)
        ]  # fmt: skip
        router, channels, trainer = _hop(
            config, TRAINER_STAGE, hop_clock or SystemClock(), hop_limits, check_share=check_share
        )
        tasks.create_task(trainer.checks.run())
        known += [peer.record for peer in peers]
        for runtime in {peer.runtime for peer in peers}:
            runtime.start()
        for peer in peers:
            await peer.start()
            stack.callback(peer.runtime.stop, PATIENCE_SECONDS)
            if warms_up:
                await peer.runtime.control(peer.backend.warm_up)
            stack.push_async_callback(peer.stop)
        stack.push_async_callback(channels.close)
        chain = Chain(config, peers, trainer, router)
        chain.update([peer.record for peer in peers])
        yield chain


def _hop(
    config: RunConfig, stage: int, clock: Clock, limits: HopLimits, memory: NewBytes = new_bytes,
    own: Callable[[PeerRecord], LocalBlock | None] = lambda _: None, own_id: PeerId = NOBODY,
    check_share: float = 0.0, encodings_in: EncodingsIn = lambda _: {},
) -> tuple[Router, ChannelPool, Hop]:  # fmt: skip
    """The hop from `stage` to the next one, with its router and channels."""
    router, channels = Router(clock, random.Random(0), own_id), ChannelPool(insecure=True)
    hop = Hop(
        HopContext(
            run_id=config.run_id, block=Block(stage + 1), router=router, channels=channels, clock=clock, limits=limits,
            own=own,
        ),
        memory=memory, check_share=check_share, drifts=not config.rounds.synchronous, encodings_in=encodings_in,
    )  # fmt: skip
    return router, channels, hop


class _Over(Exception):
    """Raised to end a task group."""


@asynccontextmanager
async def cancelled_tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that is cancelled in the end; a task that fails fails the test."""
    ready: asyncio.Future[asyncio.TaskGroup] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def host() -> None:
        with suppress(_Over):
            try:
                async with asyncio.TaskGroup() as tasks:
                    ready.set_result(tasks)
                    await over.wait()
                    raise _Over
            except ExceptionGroup as errors:
                _, others = errors.split(_Over)
                if others is not None:
                    raise others from None

    hosting = asyncio.create_task(host())
    try:
        yield await ready
    finally:
        over.set()
        await hosting
