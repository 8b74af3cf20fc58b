"""The ways to one peer. Its endpoints are tried in turn, and one that failed is tried last for a while.

While a way is in use, a better one is looked for: a direct endpoint, which gRPC dials by itself without a copy of the
bytes here, or, beside a connection that a meeting point carries, a punched one.
"""

import asyncio
import logging
from typing import Any

from swarm.errors import PeerUnavailable, SwarmError
from swarm.machine.clock import Clock
from swarm.rpc.endpoint import host_and_port
from swarm.rpc.entry import Entry, meeting_point_of
from swarm.rpc.meeting.carrying import BUFFER_BYTES, CallLine, Kind, Line, TcpLine
from swarm.rpc.meeting.dialler import Dialler, Points
from swarm.rpc.meeting.punch import punch
from swarm.rpc.v1 import meeting_pb2 as pb
from swarm.rpc.v1.meeting_pb2_grpc import MeetingServiceStub
from swarm.types import PeerId, PeerRecord

logger = logging.getLogger(__name__)

DIRECT_SECONDS = 1.0
"""Longest wait for a connection to an endpoint; gRPC waits three seconds for all together (rpc/tls)."""
TUNNEL_SECONDS = 2.5
"""Longest wait for a connection through a meeting point, which is connected to first, and then calls the peer."""
DIRECT_AGAIN_SECONDS, TUNNEL_AGAIN_SECONDS = 60.0, 5.0
"""How long an endpoint that failed, direct or through a meeting point, is tried only after the others."""
BETTER_AGAIN_SECONDS = 600.0
"""Time between two attempts at a better way than the one that works: a router's behaviour seldom changes."""


class Ways:
    def __init__(self, record: PeerRecord, points: Points, dialler: Dialler, clock: Clock) -> None:
        self._peer_id = PeerId(record.peer_id)
        self._points = points
        self._dialler = dialler
        self._clock = clock
        self._endpoints = record.endpoints
        self._announced_at = record.announced_at
        self._failed_until: dict[str, float] = {}
        self._no_better_until = 0.0

    def learn(self, record: PeerRecord) -> None:
        """Take over a record's endpoints, unless a newer record is known: other peers may pass on an old one."""
        if record.announced_at >= self._announced_at:
            self._endpoints, self._announced_at = record.endpoints, record.announced_at
            self._failed_until = {end: until for end, until in self._failed_until.items() if end in self._endpoints}

    async def open(self) -> Line:
        """Open a connection by the first way that works. Raises PeerUnavailable if no way works."""
        faults: list[str] = []
        now = self._clock.monotonic()
        # Sorting keeps the order of those that did not fail.
        for endpoint in sorted(self._endpoints, key=lambda end: max(0.0, self._failed_until.get(end, 0.0) - now)):
            try:
                return await self._opened(endpoint, meeting_point_of(endpoint))
            except (SwarmError, OSError, TimeoutError, ValueError) as error:
                faults.append(f"{endpoint}: {str(error) or 'no answer in time'}")
        raise PeerUnavailable("; ".join(faults))

    async def better(self) -> Line | str | None:
        """Find an endpoint that gRPC can dial itself, or punch a line; None if neither works now."""
        if self._clock.monotonic() < self._no_better_until:
            return None
        found = await self._direct_or_punched()
        if found is None:
            self._no_better_until = self._clock.monotonic() + BETTER_AGAIN_SECONDS
        return found

    async def _direct_or_punched(self) -> Line | str | None:
        for endpoint in self._endpoints:
            try:
                point = meeting_point_of(endpoint)
                if point is None:
                    await (await self._opened(endpoint, None)).close()
                    return endpoint
            except (OSError, TimeoutError, ValueError):
                continue
            # One try is enough: another meeting point would make no difference to the routers.
            return await punch(
                self._points, self._dialler, point, pb.MeetRequest(to=self._peer_id, run_id=self._points.run_id)
            )
        return None

    async def _opened(self, endpoint: str, point: Entry | None) -> Line:
        """Open a connection by one way, which if it fails is tried only after the others for a while."""
        seconds = DIRECT_SECONDS if point is None else TUNNEL_SECONDS
        try:
            async with asyncio.timeout(seconds):
                if point is not None:
                    line = await self._through(point)
                else:
                    stream = await asyncio.open_connection(*host_and_port(endpoint), limit=BUFFER_BYTES)
                    line = TcpLine(stream, Kind.DIRECT)
        except (SwarmError, OSError, TimeoutError):
            again_seconds = DIRECT_AGAIN_SECONDS if point is None else TUNNEL_AGAIN_SECONDS
            self._failed_until[endpoint] = self._clock.monotonic() + again_seconds
            if point is not None:
                self._points.forget(point)
            raise
        self._failed_until.pop(endpoint, None)
        return line

    async def _through(self, point: Entry) -> Line:
        if (open_here := self._points.here(point)) is not None:
            return await open_here(self._peer_id)
        channel = await self._points.connect(point)
        stub: Any = MeetingServiceStub(channel)
        opening = pb.Carried(to=self._peer_id, run_id=self._points.run_id)
        return await CallLine.opened(stub.Connect(), channel, opening, TUNNEL_SECONDS)


class Road:
    def __init__(self, ways: Ways, dialler: Dialler, clock: Clock, *, first: Line | None = None) -> None:
        """`first` is a line that is open already, for the first connection."""
        self._ways = ways
        self._dialler = dialler
        self._clock = clock
        self._first = first
        self._is_open = asyncio.Event()
        self.target, self.options = dialler.route(self._open)
        """The target and the options with which the channel is opened."""

    async def _open(self) -> Line:
        line, self._first = self._first or await self._ways.open(), None
        if line.kind is Kind.PUNCHED:
            self._is_open.clear()
        else:
            self._is_open.set()
        return line

    async def better(self) -> Line | str:
        """Wait until the channel has a connection that is not punched, and then look until a better way is found."""
        while True:
            await self._is_open.wait()
            found = await self._ways.better()
            if found is not None:
                return found
            await self._clock.sleep(BETTER_AGAIN_SECONDS)

    def close(self) -> None:
        self._dialler.forget(self.target)
