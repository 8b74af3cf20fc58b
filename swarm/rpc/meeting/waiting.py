"""Runs at a peer that others do not reach: the peer waits at meeting points, and takes connections of callers there.

Bytes of callers go to the peer's server over the loopback; there TLS ends, and the guard checks them like all others.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

import grpc

from swarm.credentials.identity import Identity
from swarm.errors import SwarmError
from swarm.machine.clock import Clock
from swarm.rpc.ask import Stream
from swarm.rpc.callers import Caller, Quota, tunnel_source
from swarm.rpc.endpoint import own_host
from swarm.rpc.entry import Entry, tunnel_through
from swarm.rpc.meeting.carrying import BUFFER_BYTES, CallLine, Kind, Line, TcpStream
from swarm.rpc.meeting.dialler import Dialler, Points
from swarm.rpc.meeting.meeting_point import BEAT_SECONDS, SILENCE_SECONDS, signed_bytes
from swarm.rpc.meeting.punch import punch, resolved
from swarm.rpc.tls import CLIENT_OPTIONS
from swarm.rpc.v1 import meeting_pb2 as pb
from swarm.rpc.v1.meeting_pb2_grpc import MeetingServiceStub

logger = logging.getLogger(__name__)

NUM_POINTS = 3
"""Meeting points at which a peer waits: two of them may die at one moment."""
LOOK_SECONDS = 0.5
"""Time between two checks of whether the peer waits at enough of them."""
AGAIN_SECONDS = 10.0
"""Least time from one attempt to wait at a meeting point until the next one there."""
CONNECT_SECONDS = 5.0
"""Longest wait until a meeting point has accepted this peer, and until a caller is connected."""
MAX_LINES = 512
"""The most connections from callers at one time. Half of them may come through one meeting point, and a quarter be, by
its word, of one caller."""
_WAIT_OPTIONS = (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
"""A ping shows within seconds that a meeting point has fallen silent."""


@dataclass(eq=False)
class Waiting:
    own: Identity
    points: Points
    clock: Clock
    server: tuple[str, int]
    """Host and port of this peer's own gRPC server."""
    candidates: Callable[[], Sequence[Entry]]
    """Gives the endpoints of peers that may be meeting points, an Entry for each."""
    _known: Sequence[Entry] = field(default=(), init=False)
    """The candidates when they were last looked at: a look takes long among many peers, and each report needs them."""
    _dialler: Dialler = field(default_factory=Dialler, init=False)
    _kept: dict[Entry, None] = field(default_factory=dict, init=False)
    """Meeting points that have accepted this peer, in the order in which they did."""
    _trying: set[Entry] = field(default_factory=set, init=False)
    _avoided_until: dict[Entry, float] = field(default_factory=dict, init=False)
    _called: Quota = field(default_factory=lambda: Quota("connections", MAX_LINES), init=False)
    """The connections of each meeting point."""
    _called_by: Quota = field(default_factory=lambda: Quota("connections", each=MAX_LINES / 4), init=False)
    """The connections of each caller at each meeting point."""
    _lines: Counter[Kind] = field(default_factory=Counter, init=False)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """This peer's endpoints: one through each endpoint of the meeting points that have accepted it.

        Those to which this peer is connected itself come first. A caller may have another version of IP than this peer.
        """
        kept = {point.peer_id for point in self._kept}
        others = (point for point in self._known if point.peer_id in kept)
        return tuple(map(tunnel_through, dict.fromkeys([*self._kept, *others])))

    def num_lines(self, kind: Kind) -> int:
        """The number of connections from callers that are open now and are of this kind."""
        return self._lines[kind]

    async def run(self) -> Never:
        """Wait at NUM_POINTS meeting points, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    for point in self._wanted():
                        self._trying.add(point)
                        tasks.create_task(self._stay(point, tasks))
                    await self.clock.sleep(LOOK_SECONDS)
        finally:
            await self._dialler.close()

    def _wanted(self) -> list[Entry]:
        now = self.clock.monotonic()
        self._avoided_until = {point: until for point, until in self._avoided_until.items() if until > now}
        taken = {point.peer_id for point in self._trying}
        self._known = self.candidates()
        free = [p for p in self._known if p.peer_id not in taken and p not in self._avoided_until]
        # The first endpoint of each peer that has not failed: a later entry of the dict replaces an earlier one.
        wanted = {point.peer_id: point for point in reversed(free)}
        return list(wanted.values())[: NUM_POINTS - len(self._trying)]

    async def _stay(self, point: Entry, tasks: asyncio.TaskGroup) -> None:
        # Set at the beginning, so that after a long wait the next attempt comes at once: this machine may have been
        # away, and not the meeting point.
        self._avoided_until[point] = self.clock.monotonic() + AGAIN_SECONDS
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                channel = await self.points.connect(point, _WAIT_OPTIONS)
            try:
                await self._wait(point, channel, tasks)
            finally:
                await channel.close()
        except (SwarmError, TimeoutError, ValueError) as error:
            level = logging.WARNING if point in self._kept else logging.DEBUG
            logger.log(level, "waits no longer at the meeting point %s: %s", point.endpoint, error or "no answer")
        finally:
            self._kept.pop(point, None)
            self._trying.discard(point)
            self.points.forget(point)

    async def _wait(self, point: Entry, channel: grpc.aio.Channel, tasks: asyncio.TaskGroup) -> None:
        """Prove this peer's key, wait and answer calls. Raises SwarmError once the waiting is over."""
        stub: Any = MeetingServiceStub(channel)
        async with Stream(stub.Wait()) as call:
            challenge = (await call.read(CONNECT_SECONDS)).challenge
            signature = self.own.sign(signed_bytes(point.peer_id, self.own.peer_id, challenge))
            proof = pb.WaitProof(
                peer_id=self.own.peer_id, certificate_pem=self.own.certificate_pem, signature=signature,
                run_id=self.points.run_id,
            )  # fmt: skip
            await call.write(pb.WaitRequest(proof=proof), CONNECT_SECONDS)
            await call.read(CONNECT_SECONDS)
            logger.info("waits at the meeting point %s", point.endpoint)
            self._kept[point] = None
            beats = asyncio.ensure_future(self._beat(call))
            try:
                while True:
                    reply = await call.read(SILENCE_SECONDS)
                    if reply.HasField("call"):
                        tasks.create_task(self._answer(point, reply.call))
            finally:
                beats.cancel()

    async def _beat(self, call: Stream) -> None:
        try:
            while True:
                await self.clock.sleep(BEAT_SECONDS)
                await call.write(pb.WaitRequest(beat=pb.Beat()), SILENCE_SECONDS)
        except (SwarmError, grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            logger.debug("no beat: %s", error)  # Unanswered, the wait ends after SILENCE_SECONDS.

    async def _answer(self, point: Entry, called: pb.Called) -> None:
        """Connect a caller to this peer's own server, for as long as the connection lasts."""
        named = Caller(f"{point.peer_id} {called.caller}")
        try:
            with self._called.taken(Caller(point.peer_id)), self._called_by.taken(named):
                if called.is_meeting:
                    line = await punch(self.points, self._dialler, point, pb.MeetRequest(token=called.token))
                else:
                    line = await self._taken(point, called.token)
                if line is not None:
                    await self._serve(line, point, named)
        except (SwarmError, OSError, TimeoutError, ValueError) as error:
            logger.debug("a caller is not connected: %s", error)

    async def _taken(self, point: Entry, token: str) -> Line:
        async with asyncio.timeout(CONNECT_SECONDS):
            channel = await self.points.connect(point)
            stub: Any = MeetingServiceStub(channel)
            return await CallLine.opened(stub.Take(), channel, pb.Carried(token=token), CONNECT_SECONDS)

    async def _serve(self, line: Line, point: Entry, caller: Caller) -> None:
        self._lines[line.kind] += 1
        try:
            stream = await self._own_server(point, caller)
            await line.carry(stream)
        finally:
            await line.close()
            self._lines[line.kind] -= 1

    async def _own_server(self, point: Entry, caller: Caller) -> TcpStream:
        """Connect to this peer's own server, from a loopback address of the caller's own if the system has several."""
        host, port = self.server
        try:
            source = (tunnel_source(caller), 0)
            return await asyncio.open_connection(host, port, local_addr=source, limit=BUFFER_BYTES)
        except OSError:
            # The server listens at one address only, or the system has one loopback address (macOS). Calls from the
            # machine's own address count as one caller, but are not taken for calls of this machine itself.
            host = own_host(*await resolved(point))
            return await asyncio.open_connection(host, port, local_addr=(host, 0), limit=BUFFER_BYTES)
