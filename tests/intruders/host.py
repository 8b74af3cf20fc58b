"""A stage peer in this process, wired as its program wires it, for intruders to attack, and honest callers of it.

The last of two stages, with real TLS, in a locked run or an open one. Its DHT is a MemoryStore.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import torch

from peers.shared.network import Membership
from peers.stage_peer.contents import Contents
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_stage import ServerOptions
from peers.stage_peer.served_block import ServedBlock
from peers.stage_peer.server import PeerServer
from swarm.config import DataConfig, ModelConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.credentials.identity import Identity
from swarm.events import Events
from swarm.hop.answers import HopListener
from swarm.hop.hop import Hop
from swarm.hop.retries import HopContext
from swarm.machine.clock import SystemClock
from swarm.routing.router import Router
from swarm.rpc import tls
from swarm.rpc.callers import Callers
from swarm.rpc.channels import ChannelPool
from swarm.rpc.tls import CLIENT_OPTIONS
from swarm.rpc.v1.stage_pb2 import Address
from swarm.stage.boundary import HIDDEN, TOKENS, boundary_of
from swarm.training.samples import Microbatch
from swarm.types import PROTOCOLS, Block, PeerRecord
from tests.support import locked
from tests.support.chain import eventually
from tests.support.here import HERE
from tests.support.memory_store import MemoryStore

STAGE = 1
OPEN_RUN = RunConfig(
    model=ModelConfig(num_layers=2, d_model=32, num_heads=2, vocab_size=64),
    stages=StagesConfig(num_stages=2),
    data=DataConfig(sequence_length=16, microbatch_size=2),
    rounds=RoundsConfig(setting="diloco", round_samples=64, inner_batch_samples=8),
)
LOCKED_RUN = replace(OPEN_RUN, owner=locked.OWNER.authority.fingerprint)


@dataclass
class Host:
    """The peer, and honest callers of it."""

    config: RunConfig
    record: PeerRecord
    server: ServedBlock
    callers: Callers
    hop: Hop
    num_honest: int = 0
    num_busy: int = 0
    """Times that honest callers were told to come again."""

    @property
    def address(self) -> Address:
        """The address that requests to it have."""
        return Address(run_id=self.config.run_id, protocol_version=PROTOCOLS.newest, stage=STAGE)

    @asynccontextmanager
    async def connected(self, identity: Identity) -> AsyncIterator[grpc.aio.Channel]:
        """A separate connection for an intruder, over which it can send anything."""
        options = (*CLIENT_OPTIONS, *tls.PINNED_OPTIONS, ("grpc.max_send_message_length", -1))
        local = (*options, ("grpc.use_local_subchannel_pool", 1))
        credentials = tls.pinned_credentials(self.record.certificate_pem, identity)
        async with grpc.aio.secure_channel(self.record.endpoint, credentials, options=local) as channel:
            yield channel

    async def train(self) -> float:
        """Train and acknowledge one honest microbatch, and return its loss."""
        index, self.num_honest = self.num_honest, self.num_honest + 1
        generator = torch.Generator().manual_seed(index)
        tensors = {
            TOKENS: torch.randint(64, (2, 17), generator=generator, dtype=torch.int32),
            HIDDEN: torch.randn(2, 16, 32, generator=generator),
        }
        async with asyncio.timeout(60):
            reply = await self.hop.train(Microbatch(index=index, round=0, num_samples=2), tensors, HopListener(), {})
            await reply.ack()
        self.num_busy += reply.num_busy
        return reply.loss

    @property
    def is_idle(self) -> bool:
        """Whether no slot is taken, no call is under way, and no byte is kept for one."""
        admitted = self.server.stage.admission.num_admitted
        return (admitted, self.callers.num_calls, self.callers.num_bytes) == (0, 0, 0)

    async def idles(self) -> None:
        await eventually(lambda: self.is_idle)


@asynccontextmanager
async def running(
    *, identity: Identity = locked.PEER, honest: Identity = locked.OTHER_PEER, max_in_flight: int = 4
) -> AsyncIterator[Host]:
    """Run the peer inside the block. `identity` decides whether the run is locked."""
    clock = SystemClock()
    config = LOCKED_RUN if identity.authority is not None else OPEN_RUN
    router = Router(clock, random.Random(0))
    member = Membership.enter(config, MemoryStore(clock), identity, clock, insecure=False)
    options = ServerOptions(
        given=PeerOptions(preset="tiny", name="host", max_in_flight=max_in_flight, graph_memory_mib=256),
        device=torch.device("cpu"), checkpoints=None, events=Events(),
    )  # fmt: skip
    channels = ChannelPool(identity=honest)
    hop = Hop(
        HopContext(run_id=config.run_id, block=Block(STAGE), router=router, channels=channels, clock=clock),
        encodings_in=lambda _: boundary_of(config).encodings,
    )  # fmt: skip
    server = PeerServer(member, [options], Contents(member, None, Path(), checkpoints=None))
    async with server.serving(HERE):
        await server.enter([Block(STAGE)])
        block = server.blocks[Block(STAGE)]
        record = block.presence.record()
        assert record.endpoints == server.announced.endpoints
        router.update(Block(STAGE), [record])
        host = Host(config, record, block, server.callers, hop)
        yield host
        await host.idles()
        await channels.close()
