"""Probes of a peer's line and clock, and the limits on what a caller may ask of the peer."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from swarm.errors import DeadlineExceeded, MalformedMessage, Overloaded, SwarmError
from swarm.machine.clock import SystemClock
from swarm.rpc import probe
from swarm.rpc.ask import Stream
from swarm.rpc.probe import ProbeServicer, measure_distance, measure_rates, passes_long
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.tls import CLIENT_OPTIONS
from swarm.rpc.v1 import probe_pb2 as pb
from swarm.rpc.v1.probe_pb2_grpc import ProbeServiceStub, add_ProbeServiceServicer_to_server
from tests.support.proxy import Direction, Proxy

SECONDS = 5.0


class Ahead(SystemClock):
    """A clock that is ahead."""

    def time(self) -> float:
        return super().time() + 7.0


class Peer:
    """A peer that is asked."""

    def __init__(self) -> None:
        self.is_exchanging = False
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        servicer = ProbeServicer(is_exchanging=lambda: self.is_exchanging, clock=Ahead())
        add_ProbeServiceServicer_to_server(servicer, self.server)
        self.port = bind_server(self.server, "127.0.0.1", 0, None)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=CLIENT_OPTIONS)

    def called(self) -> Stream:
        stub: Any = ProbeServiceStub(self.channel)
        return Stream(stub.Probe())


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    await peer.server.start()
    yield peer
    await peer.channel.close()
    await peer.server.stop(None)


async def test_its_clock_and_the_way_to_it(peer: Peer) -> None:
    distance = await measure_distance(peer.channel, SystemClock())
    assert 0.0 < distance.round_trip_seconds < 2.0
    assert distance.clock_offset_seconds == pytest.approx(7.0, abs=distance.round_trip_seconds)


@pytest.mark.parametrize("direction", [None, *Direction])
async def test_whether_long_messages_pass(
    peer: Peer, direction: Direction | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "LONG_SECONDS", 0.3 if direction else 60.0)
    peer.is_exchanging = True  # Next to nothing is asked for.
    async with Proxy("127.0.0.1", peer.port) as proxy:
        if direction is not None:
            proxy.links[direction].largest_bytes = 1300
        async with grpc.aio.insecure_channel(proxy.address, options=CLIENT_OPTIONS) as channel:
            assert await passes_long(channel) is (direction is None)


async def test_its_own_training_comes_first(peer: Peer) -> None:
    peer.is_exchanging = True
    with pytest.raises(Overloaded, match="the line is in use"):
        await measure_rates(peer.channel, SystemClock())
    # A probe without bytes is free.
    await measure_distance(peer.channel, SystemClock())


async def test_one_caller_has_half_of_what_there_is_and_not_for_long(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        await measure_rates(peer.channel, SystemClock())
    with pytest.raises(Overloaded, match="no room for more bytes of probes beside this caller's"):
        await measure_rates(peer.channel, SystemClock())
    async with peer.called() as first, peer.called() as second:
        for call in (first, second):
            await call.write(pb.ProbeRequest(), SECONDS)
            await call.read(SECONDS)
        with pytest.raises(Overloaded, match="no room for more probes beside this caller's 2"):
            await measure_distance(peer.channel, SystemClock())
        for call in (first, second):
            await call.done_writing()
    monkeypatch.setattr(probe, "CALL_SECONDS", 0.3)
    with pytest.raises(DeadlineExceeded, match="a probe takes 0 s at most"):  # noqa: PT012 - one of many messages
        async with peer.called() as call:
            await call.write(pb.ProbeRequest(), SECONDS)
            await call.read(SECONDS)
            # Nothing is written meanwhile, because gRPC hides the status from a write that comes with the end.
            await call.read(SECONDS)


async def _refusal(call: Stream, request: pb.ProbeRequest, times: int = 1) -> SwarmError:
    with pytest.raises(SwarmError) as refused:  # noqa: PT012 - any of the messages may be the one
        async with call:
            for _ in range(times):
                await call.write(request, SECONDS)
                await call.read(SECONDS)
    return refused.value


@pytest.mark.parametrize(
    "request_",
    [
        pb.ProbeRequest(data=bytes(probe.PIECE_BYTES + 1), total_bytes=1 << 20),
        pb.ProbeRequest(wanted_bytes=2**31, total_bytes=2**31),
        pb.ProbeRequest(wanted_bytes=1),
        pb.ProbeRequest(total_bytes=2**31),
    ],
    ids=["a large message", "a large answer", "more than it said", "a large call"],
)
async def test_too_much_is_refused(peer: Peer, request_: pb.ProbeRequest) -> None:
    assert isinstance(await _refusal(peer.called(), request_), MalformedMessage)


async def test_whoever_says_nothing_is_not_waited_for(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SILENCE_SECONDS", 0.2)
    with pytest.raises(DeadlineExceeded):
        async with peer.called() as call:
            await call.read(SECONDS)
