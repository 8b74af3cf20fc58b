"""A peer that cannot be reached: when the router learns of it, and when the peer is chosen again."""

import asyncio
import math
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server

from scripts.benches.shared.ports import free_ports
from swarm.errors import PathStandsStill
from swarm.hop import hop
from swarm.hop.answers import HopListener
from swarm.hop.hop import Hop, watch_connections
from swarm.hop.retries import HopContext, HopLimits
from swarm.machine.clock import SystemClock
from swarm.routing.bans import BASE_BAN_SECONDS, LEAST_BAN_SHARE
from swarm.routing.peer_queue import NOBODY
from swarm.routing.router import Router
from swarm.rpc.channels import ChannelPool
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.training.samples import Microbatch
from swarm.types import Block, PeerId, PeerRecord, PeerState
from tests.support.chain import eventually
from tests.support.manual_clock import ManualClock
from tests.support.virtual_time import LoopClock, in_virtual_time

_ID = PeerId("0123456789abcdef" * 2 + "01234567")
GAP_SECONDS = 0.15


@pytest.fixture(autouse=True)
def _short_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop, "GAP_SECONDS", GAP_SECONDS)


class _Health(HealthServicer):
    """A health service that counts the calls."""

    num_asked = 0

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        self.num_asked += 1
        return await super().Check(request, context)


class _Peer:
    """A peer that a router knows by a port, at which it may listen or not."""

    def __init__(self, channels: ChannelPool, *, is_own: bool = False) -> None:
        self.channels = channels
        self.clock = ManualClock()
        self.router = Router(self.clock, random.Random(0), _ID if is_own else NOBODY)
        self.health = _Health()
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        add_HealthServicer_to_server(self.health, self.server)
        (self.port,) = free_ports(1)
        endpoint = f"127.0.0.1:{self.port}"
        record = PeerRecord(peer_id=_ID, stage=0, endpoint=endpoint, state=PeerState.SERVING, announced_at=0.0)
        self.record = record
        self.router.update(Block(0), [record])

    async def come_back(self) -> None:
        bind_server(self.server, "127.0.0.1", self.port, None)
        await self.server.start()

    async def serve_and_be_called(self) -> None:
        """Let the peer serve and other code in this process call it, for long enough to be noticed."""
        await self.come_back()
        health: Any = HealthStub(self.channels.channel(self.record))
        await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        await asyncio.sleep(2 * GAP_SECONDS)

    async def says(self, status: int) -> None:
        await self.health.set("", status)

    @property
    def is_banned(self) -> bool:
        return self.router.choose(Block(0), 1) is None


@asynccontextmanager
async def probed(*, is_own: bool = False) -> AsyncIterator[_Peer]:
    """A peer that is watched, and at whose port nobody listens yet."""
    channels = ChannelPool(insecure=True)
    peer = _Peer(channels, is_own=is_own)
    context = HopContext(run_id="run", block=Block(0), router=peer.router, channels=channels, clock=SystemClock())
    probing = asyncio.create_task(watch_connections(context))
    try:
        yield peer
    finally:
        probing.cancel()
        with suppress(asyncio.CancelledError):
            await probing
        await channels.close()
        await peer.server.stop(None)


async def test_a_peer_is_asked_again_as_soon_as_it_serves() -> None:
    async with probed() as peer:
        peer.router.failed(Block(0), _ID, is_gone=True, is_unreachable=True)
        peer.clock.advance(LEAST_BAN_SHARE * BASE_BAN_SECONDS)
        await asyncio.sleep(2 * GAP_SECONDS)
        assert peer.is_banned
        await peer.says(health_pb2.HealthCheckResponse.NOT_SERVING)
        await peer.come_back()
        await eventually(lambda: peer.health.num_asked > 0)
        assert peer.is_banned, "it joins"
        await peer.says(health_pb2.HealthCheckResponse.SERVING)
        await eventually(lambda: not peer.is_banned)


async def test_a_process_that_stood_still_goes_on_with_its_own_block_whether_or_not_it_reaches_its_address() -> None:
    async with probed(is_own=True) as peer:
        peer.router.failed(Block(0), _ID, is_unreachable=True)
        peer.clock.advance(LEAST_BAN_SHARE * BASE_BAN_SECONDS)
        await eventually(lambda: not peer.is_banned)
        assert peer.health.num_asked == 0


async def test_a_frozen_peer_stays_banned_until_it_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop, "PATIENCE_SECONDS", 1.2 * GAP_SECONDS)  # One probe ends, and another one begins.
    async with probed() as peer:
        # The peer's machine takes connections, but nobody there answers.
        with socket.create_server(("127.0.0.1", peer.port)):
            peer.router.failed(Block(0), _ID, is_unreachable=True)
            peer.clock.advance(BASE_BAN_SECONDS - 0.5 * GAP_SECONDS)
            await asyncio.sleep(2.5 * GAP_SECONDS)
            for _ in range(4):
                peer.clock.advance(GAP_SECONDS)
                await asyncio.sleep(GAP_SECONDS)
            assert peer.is_banned, "although its ban would be over"
        await peer.says(health_pb2.HealthCheckResponse.SERVING)
        await peer.come_back()
        await eventually(lambda: not peer.is_banned)


@pytest.mark.parametrize("failure", ["none", "its own answer"])
async def test_nobody_else_is_asked(failure: str) -> None:
    async with probed() as peer:
        await peer.says(health_pb2.HealthCheckResponse.SERVING)
        await peer.come_back()
        if failure == "its own answer":
            peer.router.failed(Block(0), _ID)
        peer.clock.advance(LEAST_BAN_SHARE * BASE_BAN_SECONDS)
        await asyncio.sleep(2 * GAP_SECONDS)
        assert (peer.health.num_asked, peer.is_banned) == (0, failure == "its own answer")


async def test_a_peer_whose_connection_breaks_is_banned_though_nothing_was_handed_to_it() -> None:
    async with probed() as peer:
        await peer.serve_and_be_called()
        assert not peer.is_banned
        await peer.server.stop(None)
        await eventually(lambda: peer.is_banned)


async def test_a_look_at_many_connections_takes_no_time() -> None:
    """The look is on the event loop, twice a second, so broken connections are found once and not for every peer."""
    records = [
        PeerRecord(peer_id=_ID, stage=0, endpoint=f"192.0.2.1:{port}", state=PeerState.SERVING, announced_at=0.0)
        for port in range(1, 5001)
    ]
    looks: list[float] = []

    class Everybody(Router):
        def records(self, block: Block) -> list[PeerRecord]:
            return records

    class Connected(ChannelPool):
        def is_connected(self, record: PeerRecord) -> bool:
            return True

    class Looks(ManualClock):
        async def sleep(self, seconds: float) -> None:
            looks.append(time.thread_time())
            if len(looks) == 3:
                raise asyncio.CancelledError

    clock = Looks()
    context = HopContext(
        run_id="run", block=Block(0), router=Everybody(clock, random.Random(0)), channels=Connected(insecure=True),
        clock=clock,
    )  # fmt: skip
    with suppress(asyncio.CancelledError):
        await watch_connections(context)
    assert looks[2] - looks[1] < 0.1


@in_virtual_time
async def test_a_microbatch_of_a_path_that_stands_still_is_given_back_after_a_while_and_later_ones_at_once() -> None:
    clock, microbatch = LoopClock(), Microbatch(index=0, round=0, num_samples=1)
    router, banned = (
        Router(clock, random.Random(0)),
        PeerRecord(peer_id=_ID, stage=1, variant=2, endpoint="127.0.0.1:1", state=PeerState.SERVING, announced_at=0.0),
    )

    def make(*, empty_seconds: float) -> Hop:
        return Hop(
            HopContext(
                run_id="run", block=banned.block, router=router, channels=ChannelPool(insecure=True), clock=clock,
                limits=HopLimits(empty_seconds=empty_seconds),
            )
        )  # fmt: skip

    async def seconds_of(one: Hop) -> float:
        began_at = clock.monotonic()
        with pytest.raises(PathStandsStill, match=r"^no peer of stage 1\.2 answers$"):
            await one.train(microbatch, {}, HopListener(), {})
        return clock.monotonic() - began_at

    one = make(empty_seconds=2.0)
    assert await seconds_of(one) == pytest.approx(2.0, abs=0.3)
    router.update(banned.block, [banned])
    router.failed(banned.block, _ID)
    assert await seconds_of(one) < 0.3, "it does not answer either"
    router.update(banned.block, [])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(600.0):
            await make(empty_seconds=math.inf).train(microbatch, {}, HopListener(), {})
