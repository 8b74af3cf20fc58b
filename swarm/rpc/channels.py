"""Channels to peers: one for short calls and one for bulk transfers.

Pings show within seconds that a neighbour is frozen or out of reach. Never retries.
"""

import asyncio
import math
from collections import deque
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from swarm.credentials.identity import Identity
from swarm.credentials.rights import require_serving
from swarm.errors import NotAllowed, PeerUnavailable
from swarm.machine.clock import Clock, SystemClock
from swarm.rpc import tls
from swarm.rpc.ask import SLOWEST_BYTES_PER_SECOND
from swarm.rpc.bounds import CHUNK_BYTES, SMALL_CHUNK_BYTES
from swarm.rpc.meeting.carrying import Line
from swarm.rpc.meeting.dialler import Dialler, Points
from swarm.rpc.meeting.ways import Road, Ways
from swarm.rpc.tls import BULK_OPTIONS, CLIENT_OPTIONS
from swarm.types import TUNNEL, PeerRecord

_Key = tuple[str, str, bool]
"""A peer's place and certificate, and whether a channel is for bulk transfers."""

UNUSED_SECONDS = 3600.0
"""A channel that nothing asked for in this time is closed when another one is opened: its peer has most likely left.
Calls still under way on it may go on for the same time."""

READY_SECONDS = 5.0
"""Longest wait for TLS over a better line."""

SHORT_BYTES = 64 << 10
"""So few bytes do not hold up a ping for long, however slow the line is."""
SOON_SECONDS = 0.5
"""Where tensors arrive within this time, a ping behind them is answered in time."""
_REMEMBERED = 4
"""How many transfers are remembered for each peer. The fastest counts: a busy process only makes a line look slower."""


@dataclass(frozen=True)
class Patience:
    """What a call with tensors is given. Over a line that may be slow it uses the channel for bulk transfers."""

    more_seconds: float = 0.0
    """How much longer each of its messages may take: what was sent before it has to arrive first."""
    chunk_bytes: int = CHUNK_BYTES

    @property
    def is_needed(self) -> bool:
        return self.more_seconds > 0


@dataclass(frozen=True)
class _Opened:
    """A channel, and the Road that opens its connections; None if gRPC dials by itself."""

    channel: grpc.aio.Channel
    road: Road | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the channel has no road, so that gRPC dials its one endpoint, and that endpoint does not answer."""
        return self.road is None and self.channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    def let_go(self) -> grpc.aio.Channel:
        """Open no more connections for the channel, and return it to be closed."""
        if self.road is not None:
            self.road.close()
        return self.channel


class ChannelPool:
    """Keeps two channels for each server and certificate, which all calls share.

    One of them is for bulk transfers. A call waits behind all that was written to its connection before it, so a call
    of a few bytes behind megabytes on a slow line would miss its deadline. So would a ping, and the line would be taken
    for dead: large tensors go over the channel for short calls, where a frozen peer is noticed within seconds, only
    once others have shown that the line is fast. A peer with several endpoints, or behind a meeting point, gets a new
    channel when a better way is found; calls under way end on the old one.
    """

    def __init__(
        self, *, insecure: bool = False, identity: Identity | None = None, clock: Clock | None = None,
        points: Points | None = None, run_id: str = "",
    ) -> None:  # fmt: skip
        """`identity` is this peer's own: a member of a locked run shows it, and calls only peers of the run. `insecure`
        is to talk in the clear, and only with peers that do so too. The meeting points are those of another pool of
        this process, to share them, or its own, which are told the run."""
        self.is_insecure = insecure
        self._identity = identity
        self._authority = identity.authority if identity is not None else None
        self._clock = clock or SystemClock()
        self._channels: dict[_Key, _Opened] = {}
        self._used_at: dict[_Key, float] = {}
        self._transfer_seconds: dict[str, deque[float]] = {}
        """How long the last tensors took to each peer that gets large ones, and back, by the peer's place."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._dialler = Dialler()
        self.points = points or Points(identity, insecure=insecure, run_id=run_id)
        """The meeting points through which hidden peers are reached."""
        self._ways: dict[str, Ways] = {}
        """The ways to each peer that gRPC cannot simply dial, by the peer's place."""

    def channel(self, record: PeerRecord, *, bulk: bool = False) -> grpc.aio.Channel:
        """The channel to a peer, opened on first use. `bulk` says whether it is the one for transfers of megabytes.
        Raises PeerUnavailable if the peer announces TLS and this one does without, or the other way round; or, in a
        locked run, it is no peer of the run.
        """
        if self.is_insecure == bool(record.certificate_pem):
            secure, insecure = (record.endpoint, "this peer") if self.is_insecure else ("this peer", record.endpoint)
            raise PeerUnavailable(f"{secure} uses TLS and {insecure} does not: use --insecure on all peers or none")
        self._require_member(record)
        key, now = (record.place, record.certificate_pem, bulk), self._clock.monotonic()
        ways = self._ways_to(record)
        opened = self._channels.get(key)
        if opened is not None and ways is not None and opened.is_lost:
            # The endpoint that gRPC dials by itself answers no longer.
            self._spawn(_close([opened.let_go()], UNUSED_SECONDS))
            opened = None
        if opened is None:
            self._close_unused(now)
            opened = self._channels[key] = self._open(key, record.endpoint, ways)
            if ways is not None:
                self._spawn(self._improve(key, ways))
        self._used_at[key] = now
        return opened.channel

    def patience(self, record: PeerRecord, num_bytes: int) -> Patience:
        """What a call with so many bytes of tensors, there or back, is given."""
        if num_bytes <= SHORT_BYTES:
            return Patience()
        taken = self._transfer_seconds.setdefault(record.place, deque(maxlen=_REMEMBERED))
        is_fast = min(taken, default=math.inf) <= SOON_SECONDS
        if is_fast and self.channel(record).get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
            return Patience()
        return Patience(more_seconds=num_bytes / SLOWEST_BYTES_PER_SECOND, chunk_bytes=SMALL_CHUNK_BYTES)

    def transferred(self, record: PeerRecord, seconds: float) -> None:
        """Note how long a call's tensors took to a peer, or those of its answer back, whichever took longer."""
        if record.place in self._transfer_seconds:
            self._transfer_seconds[record.place].append(seconds)

    def lost(self, record: PeerRecord) -> None:
        """Note that a call with tensors lost its connection: the peer may be gone, or its line have become slow."""
        if record.place in self._transfer_seconds:
            self._transfer_seconds[record.place].clear()

    def is_connected(self, record: PeerRecord) -> bool:
        """Whether a channel to a peer has a connection now: the one for short calls, or that for bulk transfers where
        it carries large tensors of calls."""
        kinds = (False, True) if record.place in self._transfer_seconds else (False,)
        opened = [self._channels.get((record.place, record.certificate_pem, bulk)) for bulk in kinds]
        return any(one and one.channel.get_state() is grpc.ChannelConnectivity.READY for one in opened)

    async def close(self) -> None:
        channels = [opened.let_go() for opened in self._channels.values()]
        self._channels.clear()
        self._used_at.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await _close(channels, None)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._dialler.close()

    def _close_unused(self, now: float) -> None:
        """Close unused channels once their calls have ended. Over the weeks of a run many peers come and go."""
        unused = [key for key, used_at in self._used_at.items() if now - used_at >= UNUSED_SECONDS]
        if unused:
            channels = [self._channels.pop(key).let_go() for key in unused]
            for key in unused:
                del self._used_at[key]
            places = {place for place, _, _ in self._channels}
            self._ways = {place: ways for place, ways in self._ways.items() if place in places}
            for place in self._transfer_seconds.keys() - places:
                del self._transfer_seconds[place]
            self._spawn(_close(channels, UNUSED_SECONDS))

    def _require_member(self, record: PeerRecord) -> None:
        if self._authority is None:
            return
        try:
            member = self._authority.member(record.certificate_pem, self._clock.time())
            require_serving(member.role)
        except NotAllowed as error:
            raise PeerUnavailable(f"{record.endpoint} is no peer of this run: {error}") from None
        if member.peer_id != record.peer_id:
            raise PeerUnavailable(f"{record.endpoint} shows the certificate of {member.peer_id}")

    def _ways_to(self, record: PeerRecord) -> Ways | None:
        """The ways to a peer; None if gRPC itself dials its only endpoint."""
        if len(record.endpoints) == 1 and not record.endpoint.startswith(TUNNEL):
            return None
        if record.place not in self._ways:
            self._ways[record.place] = Ways(record, self.points, self._dialler, self._clock)
        self._ways[record.place].learn(record)
        return self._ways[record.place]

    def _open(self, key: _Key, endpoint: str, ways: Ways | None, *, first: Line | None = None) -> _Opened:
        _, certificate_pem, bulk = key
        options = BULK_OPTIONS if bulk else CLIENT_OPTIONS
        road = None if ways is None else Road(ways, self._dialler, self._clock, first=first)
        if road is not None:
            endpoint, options = road.target, (*road.options, *options)
        return _Opened(
            tls.open_channel(endpoint, None if self.is_insecure else certificate_pem, self._identity, options), road
        )

    async def _improve(self, key: _Key, ways: Ways) -> None:
        """Replace a channel whose connections are copied here or carried by a meeting point once a better way works."""
        while (opened := self._channels.get(key)) is not None and opened.road is not None:
            found = await opened.road.better()
            better = self._open(key, found, None) if isinstance(found, str) else self._open(key, "", ways, first=found)
            try:
                # The new channel is used only once it is connected. Otherwise its peer would seem to be out of reach.
                with suppress(TimeoutError):
                    async with asyncio.timeout(READY_SECONDS):
                        await better.channel.channel_ready()
                        if self._channels.get(key) is opened:
                            self._channels[key] = better
            finally:
                # Also when the pool is closed meanwhile.
                if is_unused := self._channels.get(key) is not better:
                    if not isinstance(found, str):
                        await found.close()
                    await better.let_go().close()
            if is_unused:
                await self._clock.sleep(READY_SECONDS)
            else:
                self._spawn(_close([opened.let_go()], UNUSED_SECONDS))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _close(channels: Iterable[grpc.aio.Channel], grace_seconds: float | None) -> None:
    await asyncio.gather(*(channel.close(grace_seconds) for channel in channels))
