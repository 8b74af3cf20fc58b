"""Stage peers in one process, with real servers and weights and a DHT in memory. They move when a test says so."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from peers.shared.named_model import OwnModel
from peers.shared.network import Membership
from peers.stage_peer.contents import Contents
from peers.stage_peer.mover import Mover
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_stage import ServerOptions
from peers.stage_peer.rebalancer import Claim, Rebalancer
from peers.stage_peer.served_block import ServedBlock
from peers.stage_peer.server import PeerServer
from swarm.checkpoint.keeping import Keeping
from swarm.checkpoint.writer import CheckpointWriter
from swarm.config import RunConfig
from swarm.credentials.identity import generate
from swarm.events import Event, Events, Leave
from swarm.hop.answers import HopListener, HopReply
from swarm.hop.hop import Hop
from swarm.hop.retries import HopContext
from swarm.machine.clock import SystemClock
from swarm.rebalancing.layout import Span
from swarm.routing.router import Router
from swarm.rpc.channels import ChannelPool
from swarm.stage.boundary import TOKENS
from swarm.training.samples import Microbatch
from swarm.types import Block, PeerId, PeerRecord
from tests.support.chain import tokens
from tests.support.here import HERE
from tests.support.memory_store import MemoryStore

ROUND = 3
"""The round of the state with which peers begin."""


class Ordered(Rebalancer):
    """Moves when the test says so, and checks only whether the peer can be spared."""

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self.orders: asyncio.Queue[int | Span] = asyncio.Queue()

    async def next_move(self, span: Span, rates: Callable[[], Mapping[Block, float]]) -> Span:
        target = await self.orders.get()
        going = (Block(target),) if isinstance(target, int) else target
        await self.goes(going, before=span)
        return going


class Record(Events):
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.blocks: list[Block | None] = []
        """The block that each of the events is about."""

    def write(self, event: Event, block: Block | None = None) -> None:
        self.events.append(event)
        self.blocks.append(block)


class LocalPeer:
    """One swarm-peer, without its process."""

    def __init__(
        self,
        config: RunConfig,
        store: MemoryStore,
        *,
        resume: Path,
        checkpoints: Path | None = None,
        model: OwnModel | None = None,
        cache: Path | None = None,
    ) -> None:
        """`model` is the user's copy of the model that the run begins with, and `cache` for weights that the peer gets
        from others; None if the run's weights are drawn from its seed."""
        self._config = config
        self.identity = generate()
        self.peer_id = PeerId(self.identity.peer_id)
        self.clock = SystemClock()
        self._membership = Membership.enter(config, store, self.identity, self.clock, insecure=True)
        self.directory, self.known = self._membership.directory, self._membership.known
        self._contents = Contents(self._membership, model, cache or resume, checkpoints=None)
        self._resume = resume
        self.writer = CheckpointWriter(checkpoints, Keeping(every=100), owner=self.peer_id) if checkpoints else None
        claim = Claim(self._membership, "local")
        self.rebalancer = Ordered(
            self._membership, claim, random.Random(self.peer_id), every_seconds=1.0, checkpoints=resume
        )
        self.log = Record()
        self.stop = asyncio.Event()
        self.served: asyncio.Queue[int] = asyncio.Queue()
        """Gets the number of every stage once the peer serves it."""
        self.whole: PeerServer | None = None
        """The server of all blocks that it serves."""

    @property
    def server(self) -> ServedBlock | None:
        """The first of the blocks that it has."""
        return next(iter(self.whole.blocks.values()), None) if self.whole is not None else None

    @asynccontextmanager
    async def running(self, stage: int, *more: int | Block) -> AsyncIterator["LocalPeer"]:
        """Serve inside the block, at first this stage, or several."""
        given = PeerOptions(
            preset="tiny", stage="auto", name="local", max_in_flight=4, graph_memory_mib=1, resume=self._resume
        )
        options = ServerOptions(given=given, device=torch.device("cpu"), checkpoints=self.writer, events=self.log)
        self.whole = PeerServer(self._membership, [options], self._contents)
        mover = Mover(
            self.whole, self.rebalancer, clock=self.clock, stop=self.stop, listen=HERE,
            on_serving=lambda span, _: self.served.put_nowait(span[0].stage),
        )  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            blocks = self._config.blocks
            await self.known.look(self.directory, blocks)
            watching = tasks.create_task(self.directory.watch(blocks, self.known.update, 0.2))
            running = tasks.create_task(mover.run(tuple(map(_block, (stage, *more)))))
            try:
                assert await self.next_served() == stage
                yield self
            finally:
                self.stop.set()
                with suppress(asyncio.CancelledError):
                    await running
                watching.cancel()
        await self._membership.channels.close()

    async def next_served(self) -> int:
        async with asyncio.timeout(30.0):
            return await self.served.get()

    async def has_left(self) -> None:
        async with asyncio.timeout(10.0):
            while Leave() not in self.log.events:  # noqa: ASYNC110 - nothing says when
                await asyncio.sleep(0.05)

    async def record(self, stage: int | Block) -> PeerRecord | None:
        """What this peer announces at a stage, or at one of its variants."""
        return next((r for r in await self.directory.peers(_block(stage)) if r.peer_id == self.peer_id), None)

    async def state(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Round, anchor and outer state of the stage that the peer serves now."""
        assert self.server is not None
        snapshot = await self.server.member.snapshot()
        return snapshot.round, dict(snapshot.tensors)


def _block(one: int | Block) -> Block:
    return Block(one) if isinstance(one, int) else one


@asynccontextmanager
async def trainer(
    config: RunConfig, peers: Sequence[LocalPeer]
) -> AsyncIterator[Callable[[int], Coroutine[None, None, HopReply]]]:
    """A function that hands a microbatch to one of these peers and returns the answer, not acknowledged yet."""
    clock = SystemClock()
    router = Router(clock, random.Random(0))
    router.update(Block(0), [record for peer in peers if (record := await peer.record(0)) is not None])
    channels = ChannelPool(insecure=True)
    hop = Hop(HopContext(run_id=config.run_id, block=Block(0), router=router, channels=channels, clock=clock))

    async def train(index: int) -> HopReply:
        microbatch = Microbatch(
            index=index, round=index // config.microbatches_per_round, num_samples=config.data.microbatch_size
        )
        return await hop.train(microbatch, {TOKENS: tokens(config, index)}, HopListener(), {})

    async with asyncio.timeout(30.0):
        yield train
    await channels.close()


async def train_all(config: RunConfig, peers: Sequence[LocalPeer], microbatches: Sequence[int]) -> list[float]:
    """Train on microbatches as a trainer does, each through one of these peers; gives the losses."""
    async with trainer(config, peers) as train:

        async def one(index: int) -> float:
            reply = await train(index)
            await reply.ack()
            return reply.loss

        return await asyncio.gather(*map(one, microbatches))
