"""Measures the distance to a peer, the rate of the line and the offset of its clock: both ends of ProbeService.

Bytes without a meaning go there and back, next to none while the asked peer exchanges: its own training comes first.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from swarm.errors import DeadlineExceeded, MalformedMessage, Overloaded, PeerUnavailable
from swarm.machine.clock import Clock
from swarm.rpc.ask import Stream
from swarm.rpc.callers import Caller, Quota, token_or_address_of
from swarm.rpc.endpoint import host_and_port
from swarm.rpc.entry import shown_certificate
from swarm.rpc.failures import answers_errors
from swarm.rpc.serving import Context, receive, send
from swarm.rpc.v1 import probe_pb2 as pb
from swarm.rpc.v1.probe_pb2_grpc import ProbeServiceServicer, ProbeServiceStub

PIECE_BYTES = 32 << 10
"""Largest message."""
MOST_UNDER_WAY = 16
"""The most messages that are sent before the first of them is answered."""
MEASURED_BYTES = 2 << 20
"""How many bytes go each way to measure a rate, if the line is fast enough."""
MEASURING_SECONDS = 2.0
"""How long a rate is measured at most. Bytes that have not been sent by then are left out."""
MAX_CALL_BYTES = 2 * MEASURED_BYTES
"""The most bytes that a servicer takes and gives in one call."""
MOST_CALLS, CALL_SECONDS = 4, 20.0
"""The most calls that are answered at a time, half of them for one caller, and how long each may take."""
BUDGET_BYTES, BUDGET_SECONDS = 8 * MEASURED_BYTES, 60.0
"""The most bytes that a servicer takes and gives in all calls, half of them for one caller, within these seconds."""
LINE_SECONDS = 5.0
"""How long a caller waits before it asks again for bytes that it was not given."""
SILENCE_SECONDS = 5.0
"""Longest wait for a message."""
NUM_ROUND_TRIPS = 3
LONG_BYTES = 4 << 10
"""The size of a message that takes several packets on any line except the loopback."""
LONG_SECONDS = 3.0
"""The longest wait for each answer while `passes_long` finds out whether long messages get through."""
SHORT_ALONE = (
    "short messages pass on the way there, and none that takes several packets: something in between, such as a VPN, "
    "drops large packets. Make them smaller on this machine: ip link set dev INTERFACE mtu 1280"
)
"""The message for users if `passes_long` returns False: what is wrong, and what to do."""


@answers_errors
class ProbeServicer(ProbeServiceServicer):
    def __init__(self, *, is_exchanging: Callable[[], bool], clock: Clock) -> None:
        self._is_exchanging = is_exchanging
        self._clock = clock
        self._calls = Quota("probes", MOST_CALLS)
        self._bytes = Quota(
            "bytes of probes", BUDGET_BYTES, retry_seconds=LINE_SECONDS,
            per_second=BUDGET_BYTES / 2 / BUDGET_SECONDS, clock=clock,
        )  # fmt: skip

    async def Probe(self, request_iterator: object, context: Context) -> None:  # type: ignore[override]
        caller = token_or_address_of(context)
        try:
            with self._calls.taken(caller):
                async with asyncio.timeout(CALL_SECONDS):
                    await self._answer(caller, context)
        except TimeoutError:
            raise DeadlineExceeded(f"a probe takes {CALL_SECONDS:.0f} s at most") from None

    async def _answer(self, caller: Caller, context: Context) -> None:
        left: int | None = None
        while (request := await self._read(context)) is not None:
            if left is None:
                left = request.total_bytes
                # Too many bytes are refused here, because later the caller would be busy writing and would not read the
                # error.
                self._reserve(caller, left)
            left -= len(request.data) + request.wanted_bytes
            if left < 0 or max(len(request.data), request.wanted_bytes) > PIECE_BYTES:
                raise MalformedMessage(f"a probe moves what it said, and at most {PIECE_BYTES} bytes at a time")
            reply = pb.ProbeReply(time=self._clock.time(), data=bytes(request.wanted_bytes))
            await send(context, reply, SILENCE_SECONDS)

    async def _read(self, context: Context) -> pb.ProbeRequest | None:
        """The next request; None at the end. Raises DeadlineExceeded, MalformedMessage."""
        request = await receive(context, SILENCE_SECONDS)
        if not isinstance(request, pb.ProbeRequest | None):
            raise MalformedMessage("that is no probe")
        return request

    def _reserve(self, caller: Caller, num_bytes: int) -> None:
        """Count a call's bytes. Raises MalformedMessage if they are too many, Overloaded if the line is in use."""
        if num_bytes > MAX_CALL_BYTES:
            raise MalformedMessage(f"a probe moves at most {MAX_CALL_BYTES} bytes in all")
        if num_bytes > 2 * LONG_BYTES and self._is_exchanging():
            raise Overloaded("the line is in use", retry_after_seconds=LINE_SECONDS)
        self._bytes.take(caller, num_bytes)


@dataclass(frozen=True, kw_only=True)
class Distance:
    round_trip_seconds: float
    """The shortest of several."""
    clock_offset_seconds: float
    """By how much its wall clock is ahead of this machine's, give or take half a round trip."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of the line to one peer, in bytes per second."""

    up_per_second: float
    down_per_second: float


async def measure_distance(channel: grpc.aio.Channel, clock: Clock) -> Distance:
    """Ask a peer for the time, several times. Cancellation ends the call. Raises the SwarmError with which it
    refuses, or PeerUnavailable if it does not answer."""
    found: list[Distance] = []
    async with Stream(_open(channel)) as call:
        for _ in range(NUM_ROUND_TRIPS):
            began_at = clock.monotonic()
            await call.write(pb.ProbeRequest(), SILENCE_SECONDS)
            reply = await call.read(SILENCE_SECONDS)
            seconds = clock.monotonic() - began_at
            offset = reply.time - (clock.time() - seconds / 2)
            found.append(Distance(round_trip_seconds=seconds, clock_offset_seconds=offset))
        call.cancel()
    return min(found, key=lambda distance: distance.round_trip_seconds)


async def passes_long(channel: grpc.aio.Channel, endpoint: str = "") -> bool:
    """Whether a message of several packets reaches a peer, and another one comes back.

    Some paths lose all packets of full size, without a word to either end; after a long message the channel is broken
    then. Only short messages get through, and with TLS gRPC does not even connect, because the key that it offers fills
    a packet. So with TLS the peer's certificate, a short message, is asked for at `endpoint`.

    Raises SwarmError if not even a short message was answered, or the peer answers another probe now. Cancellation ends
    the call.
    """
    is_heard = False
    try:
        async with Stream(_open(channel)) as call:
            await call.write(pb.ProbeRequest(total_bytes=2 * LONG_BYTES), LONG_SECONDS)
            await call.read(LONG_SECONDS)
            is_heard = True
            await call.write(pb.ProbeRequest(data=bytes(LONG_BYTES), wanted_bytes=LONG_BYTES), LONG_SECONDS)
            await call.read(LONG_SECONDS)
            call.cancel()
    except PeerUnavailable as error:
        is_silent = error.is_unreachable and not error.is_gone
        if not is_heard and not (is_silent and endpoint and await _shows_certificate(endpoint)):
            raise
        return False
    return True


async def _shows_certificate(endpoint: str) -> bool:
    try:
        async with asyncio.timeout(LONG_SECONDS):
            await shown_certificate(*host_and_port(endpoint))
    except (OSError, TimeoutError):
        return False
    return True


async def measure_rates(channel: grpc.aio.Channel, clock: Clock) -> Rates:
    """Send bytes to a peer, and have it send some, for MEASURING_SECONDS each at most. Raises as measure_distance."""
    async with Stream(_open(channel)) as call:
        await call.write(pb.ProbeRequest(total_bytes=2 * MEASURED_BYTES), SILENCE_SECONDS)
        await call.read(SILENCE_SECONDS)
        up = await _rate(call, pb.ProbeRequest(data=bytes(PIECE_BYTES)), clock)
        down = await _rate(call, pb.ProbeRequest(wanted_bytes=PIECE_BYTES), clock)
        call.cancel()
    return Rates(up_per_second=up, down_per_second=down)


async def _rate(call: Stream, request: pb.ProbeRequest, clock: Clock) -> float:
    """Send a request again and again, and return at how many bytes per second its pieces cross the line."""
    began_at, num_sent, num_answered = clock.monotonic(), 0, 0
    while True:
        # Few are under way at first: when the time is over, all of them still have to cross what may be a slow line.
        has_room = num_sent - num_answered < min(2 + num_answered, MOST_UNDER_WAY)
        is_over = num_sent * PIECE_BYTES >= MEASURED_BYTES or clock.monotonic() >= began_at + MEASURING_SECONDS
        if has_room and not is_over:
            await call.write(request, SILENCE_SECONDS)
            num_sent += 1
        elif num_answered < num_sent:
            await call.read(SILENCE_SECONDS)
            num_answered += 1
        else:
            return num_answered * PIECE_BYTES / (clock.monotonic() - began_at)


def _open(channel: grpc.aio.Channel) -> Any:
    stub: Any = ProbeServiceStub(channel)
    return stub.Probe()
