"""A whole swarm in one process: real stage peers and trainers on the loopback, with a DHT in memory.

For tests in which microbatches and rounds work together. Peers run the code of swarm-peer; only the DHT, the corpus and
the process around it are replaced. Peers and trainers log their events, as the programs do.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, cast

import torch

from peers.shared.event_file import start_of
from peers.shared.network import KnownPeers, Membership
from peers.stage_peer.contents import Contents
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_stage import ServerOptions
from peers.stage_peer.served_block import ServedBlock
from peers.stage_peer.server import PeerServer
from swarm.config import DataConfig, RunConfig
from swarm.credentials import identity as identities
from swarm.credentials.token import Token
from swarm.data.microbatches import Microbatches, Texts
from swarm.data.prepared import Prepared
from swarm.dht.directory import Directory
from swarm.events import EventLog
from swarm.hop.hop import Hop
from swarm.hop.retries import HopContext, HopLimits
from swarm.machine.clock import SystemClock
from swarm.pipeline.lease_service import LeaseClient
from swarm.pipeline.leased_work import LeasedWork
from swarm.pipeline.round_watcher import RoundWatcher
from swarm.pipeline.train_loop import Step, TrainLoop
from swarm.pipeline.trainer_paths import TrainerPaths
from swarm.routing.router import Router
from swarm.rpc.channels import ChannelPool
from swarm.training.samples import TOKENS
from swarm.types import TRAINER_STAGE, Block
from tests.support.chain import tokens
from tests.support.here import HERE
from tests.support.memory_store import MemoryStore

LOOK_SECONDS = 0.2
CLOCK = SystemClock()


@dataclass(eq=False)
class WholePeer:
    stage: int
    peer_id: str
    log: EventLog
    task: asyncio.Task[None] | None = None
    servers: Mapping[Block, ServedBlock] = field(default_factory=dict)
    """The blocks that it serves."""

    @property
    def server(self) -> ServedBlock | None:
        return next(iter(self.servers.values()), None)

    async def kill(self) -> None:
        """End the peer without any message to others. This is as similar to kill -9 as is possible within a process;
        calls under way end a second later."""
        assert self.task is not None
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


@dataclass(eq=False)
class WholeSwarm:
    """Peers and trainers of one run. `folder` takes their event logs; `tokens` gives a microbatch's, by its index.
    `resume` and `start_over` are options of the peers that start from then on."""

    config: RunConfig
    folder: Path
    resume: Path | None = None
    start_over: bool = False
    tokens: Callable[[RunConfig, int], torch.Tensor] = tokens
    peers: list[WholePeer] = field(default_factory=list)
    token: Token | None = None
    """With which peers and trainers join; None for a run without TLS."""
    store: MemoryStore = field(default_factory=lambda: MemoryStore(CLOCK))
    _num_logs: int = 0

    @property
    def logs(self) -> list[Path]:
        """The event logs of all processes that there ever were."""
        return sorted(self.folder.iterdir())

    async def start(self, stage: int, *more: int, path: int | None = None, token: Token | None = None) -> WholePeer:
        """Start a peer of one stage, or of several, and return it when it serves. Of a stage with variants it serves
        all, or those on a path. It joins with a token of its own, or the swarm's, if that has one."""
        blocks = self.config.blocks if path is None else self.config.blocks_of(path)
        own = self._admitted(token)
        peer = WholePeer(stage=stage, peer_id=own.peer_id, log=self._log(f"peer-{stage}"))
        serving = asyncio.get_running_loop().create_future()
        peer.task = asyncio.create_task(
            self._run(peer, own, [block for block in blocks if block.stage in (stage, *more)], serving)
        )
        await asyncio.wait([peer.task, serving], return_when=asyncio.FIRST_COMPLETED)
        if peer.task.done():
            peer.task.result()
        self.peers.append(peer)
        return peer

    async def _run(
        self, peer: WholePeer, own: identities.Identity, served: Sequence[Block], serving: "asyncio.Future[None]"
    ) -> None:
        config, blocks = self.config, self.config.blocks
        peer.log.write(start_of(config, peer_id=own.peer_id, name="", stage=peer.stage))
        member = Membership.enter(config, self.store, own, CLOCK, insecure=self.token is None)
        options = ServerOptions(
            given=PeerOptions(
                preset="tiny", graph_memory_mib=1024, resume=self.resume, start_over=self.start_over
            ),
            device=torch.device("cpu"), checkpoints=None, events=peer.log,
        )  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            await member.known.look(member.directory, blocks)
            tasks.create_task(member.directory.watch(blocks, member.known.update, LOOK_SECONDS))
            server = PeerServer(member, [options], Contents(member, None, self.folder, checkpoints=None))
            peer.servers = server.blocks
            async with server.serving(HERE):
                await server.enter(served)
                serving.set_result(None)
                await asyncio.Event().wait()

    async def train(
        self, steps: int, *, first: int = 0, chosen: Collection[int] = (), data: Microbatches | None = None,
        amendments: Sequence[str] = (), later: Callable[[DataConfig], Microbatches] | None = None,
    ) -> list[Step]:  # fmt: skip
        """Let a new trainer of the chosen paths, or of all, train this many steps, and return the steps. It reads
        `tokens` or other data, knows these amendments, and opens `later` texts."""
        config, blocks = self.config, self.config.blocks
        own, log, done = self._admitted(), self._log("trainer"), list[Step]()
        log.write(start_of(config, peer_id=own.peer_id, name="", stage=TRAINER_STAGE))
        member = Membership.enter(config, self.store, own, CLOCK, insecure=self.token is None)
        known, directory, channels = member.known, member.directory, member.channels
        router = known.router
        member.timeline.add(amendments)
        await known.look(directory, blocks)
        paths = TrainerPaths(config, CLOCK, known.peers, chosen)
        hops = {
            block: Hop(
                HopContext(
                    run_id=config.run_id, block=block, router=router, channels=channels, clock=CLOCK,
                    limits=HopLimits.of(config, block),
                ),
                events=log, check_share=config.rounds.check_share, drifts=not config.rounds.synchronous,
            )
            for block in paths.entries
        }  # fmt: skip
        watcher = RoundWatcher(
            run_id=config.run_id, blocks=paths.followed, synchronous=config.rounds.synchronous, peers=known.peers,
            channels=channels,
        )  # fmt: skip
        leases = LeaseClient(config=config, trainer_id=own.peer_id, peers=known.peers, channels=channels, clock=CLOCK)
        work = LeasedWork(
            config=config, paths=paths, leases=leases, clock=CLOCK, max_in_flight=16,
            on_waiting=lambda block, obstacle: None,
        )  # fmt: skip
        text = data or cast(Microbatches, _Data(config, self.tokens))
        texts = Texts(text, config.data, later)
        loop = TrainLoop(
            config=config, paths=paths, texts=texts, hops=hops, work=work, watcher=watcher, clock=CLOCK,
            on_waiting=lambda block, obstacle: None, events=log, timeline=member.timeline,
        )  # fmt: skip

        async def take(step: Step) -> None:
            done.append(step)

        background = [asyncio.create_task(directory.watch(blocks, known.update, LOOK_SECONDS))]
        background += [asyncio.create_task(hop.checks.run()) for hop in hops.values()]
        background += [asyncio.create_task(member.follow_amendments())]
        try:
            await loop.run(first, steps, take)
        finally:
            for task in background:
                task.cancel()
            await channels.close()
        return done

    @asynccontextmanager
    async def hop(self) -> AsyncIterator[Hop]:
        """The hop of a trainer that evaluates, to the only block of stage 0."""
        own = self._admitted()
        router, channels = Router(CLOCK, random.Random(0)), self._channels(own)
        directory = Directory(self.store, own, self.config.run_id, CLOCK)
        await KnownPeers(router).look(directory, self.config.blocks)
        yield Hop(HopContext(run_id=self.config.run_id, block=Block(0), router=router, channels=channels, clock=CLOCK))
        await channels.close()

    def _admitted(self, token: Token | None = None) -> identities.Identity:
        own, token = identities.generate(), token or self.token
        return own if token is None else token.admit(own)

    def _channels(self, own: identities.Identity) -> ChannelPool:
        return ChannelPool(insecure=self.token is None, identity=None if self.token is None else own)

    def _log(self, name: str) -> EventLog:
        self.folder.mkdir(exist_ok=True)
        self._num_logs += 1
        return EventLog(self.folder / f"{self._num_logs:02}-{name}.jsonl", CLOCK)


@dataclass(frozen=True)
class _Data:
    config: RunConfig
    tokens: Callable[[RunConfig, int], torch.Tensor]

    def weighted(self, weights: tuple[float, ...]) -> Self:
        return self

    def preparing(self, index: int) -> list[Future[Prepared]]:
        return []

    def samples(self, index: int) -> dict[str, torch.Tensor]:
        return {TOKENS: self.tokens(self.config, index)}


@asynccontextmanager
async def whole_swarm(
    config: RunConfig, folder: Path, *, num_peers: tuple[int, ...], resume: Path | None = None,
    tokens: Callable[[RunConfig, int], torch.Tensor] = tokens, token: Token | None = None,
) -> AsyncIterator[WholeSwarm]:  # fmt: skip
    """A swarm with these numbers of peers at its stages. All of them end with the block."""
    swarm = WholeSwarm(config, folder, resume=resume, tokens=tokens, token=token)
    try:
        for stage, count in enumerate(num_peers):
            for _ in range(count):
                await swarm.start(stage)
        yield swarm
    finally:
        await asyncio.gather(*(peer.kill() for peer in swarm.peers))
