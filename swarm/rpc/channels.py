"""Channels to peers, the ports of servers, and errors across them.

Used by everything that calls a peer or serves peers. A peer has one channel, and a second one for bulk transfers; pings
show within seconds that a neighbour is frozen or out of reach. The exceptions of swarm.errors travel over the wire.
Never retries.
"""

import asyncio
import re
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from swarm import errors
from swarm.credentials.certificates import Role
from swarm.credentials.identity import Identity
from swarm.errors import NotAllowed, PeerUnavailable, SwarmError
from swarm.machine.clock import Clock, SystemClock
from swarm.rpc import tls
from swarm.rpc.callers import MAX_CALLS
from swarm.rpc.meeting.carrying import Line
from swarm.rpc.meeting.dialler import Dialler
from swarm.rpc.meeting.points import Points
from swarm.rpc.meeting.ways import Road, Ways
from swarm.rpc.options import BULK_OPTIONS, CLIENT_OPTIONS, MAX_MESSAGE_BYTES, Options
from swarm.types import TUNNEL, PeerRecord

_Key = tuple[str, str, bool]
"""A peer's place and certificate, and whether a channel is for bulk transfers."""

MESSAGE_SECONDS = 30.0
"""How long a server waits at most for the next message of a stream, and for its caller to take one."""

UNUSED_SECONDS = 3600.0
"""A channel that nothing asked for in this time is closed when another one is opened: its peer has most likely left.
Calls that it still has may go on for the same time."""


SERVER_OPTIONS: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # On one connection; gRPC itself holds the rest back, or refuses it.
    ("grpc.max_concurrent_streams", MAX_CALLS),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # Otherwise two servers could share one port, and each other's calls.
    ("grpc.so_reuseport", 0),
)

_ERROR_KEY = "swarm-error"
_ARGUMENT_KEY = "swarm-error-argument"

_CODES: dict[type[SwarmError], grpc.StatusCode] = {
    errors.PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.NotReady: grpc.StatusCode.UNAVAILABLE,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.MalformedMessage: grpc.StatusCode.INVALID_ARGUMENT,
    errors.WrongStage: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WrongRun: grpc.StatusCode.FAILED_PRECONDITION,
    errors.IncompatibleVersion: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CorpusMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RoundMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleMicrobatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RoundGone: grpc.StatusCode.FAILED_PRECONDITION,
    errors.IntegrityError: grpc.StatusCode.DATA_LOSS,
    errors.NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    errors.RetriesExhausted: grpc.StatusCode.ABORTED,
}
_TIMED_OUT = re.compile("timed? ?-?out|deadline|endpoint closing|response code 504", re.IGNORECASE)
"""What gRPC says of an attempt to connect that took too long. Of a TLS handshake that did, it says that it closed the
socket itself. 504 is what meeting/dialler answers where no way worked."""
_CLASSES = {error_class.__name__: error_class for error_class in _CODES}


READY_SECONDS = 5.0
"""Longest wait for TLS over a better line."""


@dataclass(frozen=True)
class _Opened:
    """A channel, and for a peer with several ways what opens its connections."""

    channel: grpc.aio.Channel
    road: Road | None = None

    @property
    def is_lost(self) -> bool:
        """Whether gRPC dials by itself, and in vain."""
        return self.road is None and self.channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    def let_go(self) -> grpc.aio.Channel:
        """Open no more connections."""
        if self.road is not None:
            self.road.close()
        return self.channel


class ChannelPool:
    """Two channels for each server and certificate; reused by all calls, which may run at the same time.

    One is for bulk transfers. A call waits behind all that was written to its connection before, and a call of a few
    bytes behind megabytes on a slow line would miss its deadline. A peer with several ways, or behind a meeting point,
    gets a new channel when a better way is found; calls under way end on the one that they have.
    """

    def __init__(self, *, insecure: bool = False, identity: Identity | None = None, clock: Clock | None = None) -> None:
        """
        Args:
            insecure: talk in the clear, and only with peers that do so too.
            identity: this peer's own. A member of a locked run shows it, and calls only peers of the run.
            clock: tells whether certificates hold.
        """
        self.is_insecure = insecure
        self._identity = identity
        self._authority = identity.authority if identity is not None else None
        self._clock = clock or SystemClock()
        self._channels: dict[_Key, _Opened] = {}
        self._used_at: dict[_Key, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._dialler = Dialler()
        self._points = Points(identity, insecure=insecure)
        self._ways: dict[str, Ways] = {}
        """By place, of peers that are not simply dialled."""

    def channel(self, record: PeerRecord, *, bulk: bool = False) -> grpc.aio.Channel:
        """The channel to a peer, opened on first use.

        Args:
            bulk: the one for transfers of megabytes that nothing short waits for.

        Raises:
            PeerUnavailable: the peer announces TLS and this one does without, or the other way round; or, in a
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
            # The endpoint that was the best answers no longer.
            self._spawn(_close([opened.let_go()], UNUSED_SECONDS))
            opened = None
        if opened is None:
            self._close_unused(now)
            opened = self._channels[key] = self._open(key, record.endpoint, ways)
            if ways is not None:
                self._spawn(self._improve(key, ways))
        self._used_at[key] = now
        return opened.channel

    def is_connected(self, record: PeerRecord) -> bool:
        """Whether the channel to a peer, the one for short calls, has a connection now."""
        opened = self._channels.get((record.place, record.certificate_pem, False))
        return opened is not None and opened.channel.get_state() is grpc.ChannelConnectivity.READY

    async def close(self) -> None:
        """Close all channels, and cancel their calls."""
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
        """Close unused channels once their calls have ended. Peers come and go for weeks."""
        unused = [key for key, used_at in self._used_at.items() if now - used_at >= UNUSED_SECONDS]
        if unused:
            channels = [self._channels.pop(key).let_go() for key in unused]
            for key in unused:
                del self._used_at[key]
            places = {place for place, _, _ in self._channels}
            self._ways = {place: ways for place, ways in self._ways.items() if place in places}
            self._spawn(_close(channels, UNUSED_SECONDS))

    def _require_member(self, record: PeerRecord) -> None:
        if self._authority is None:
            return
        try:
            member = self._authority.member(record.certificate_pem, self._clock.time())
        except NotAllowed as error:
            raise PeerUnavailable(f"{record.endpoint} is no peer of this run: {error}") from None
        if member.role is not Role.PEER:
            raise PeerUnavailable(f"{record.endpoint} is no peer of this run: it has a trainer's token")
        if member.peer_id != record.peer_id:
            raise PeerUnavailable(f"{record.endpoint} shows the certificate of {member.peer_id}")

    def _ways_to(self, record: PeerRecord) -> Ways | None:
        """The ways to a peer; None if gRPC itself dials its only endpoint."""
        if len(record.endpoints) == 1 and not record.endpoint.startswith(TUNNEL):
            return None
        if record.place not in self._ways:
            self._ways[record.place] = Ways(record, self._points, self._dialler, self._clock)
        self._ways[record.place].learn(record)
        return self._ways[record.place]

    def _open(self, key: _Key, endpoint: str, ways: Ways | None, *, first: Line | None = None) -> _Opened:
        _, certificate_pem, bulk = key
        options = BULK_OPTIONS if bulk else CLIENT_OPTIONS
        road = None if ways is None else Road(ways, self._dialler, self._clock, first=first)
        if road is not None:
            endpoint, options = road.target, (*options, *road.options)
        if self.is_insecure:
            return _Opened(grpc.aio.insecure_channel(endpoint, options=options), road)
        credentials = tls.pinned_credentials(certificate_pem, self._identity)
        return _Opened(grpc.aio.secure_channel(endpoint, credentials, options=(*options, *tls.PINNED_OPTIONS)), road)

    async def _improve(self, key: _Key, ways: Ways) -> None:
        """Put a better channel in the place of one whose connections are copied or carried, when there is one."""
        while (opened := self._channels.get(key)) is not None and opened.road is not None:
            found = await opened.road.better()
            better = self._open(key, found, None) if isinstance(found, str) else self._open(key, "", ways, first=found)
            is_ready = False
            # Only once it is connected: else its peer would seem to be out of reach.
            with suppress(TimeoutError):
                async with asyncio.timeout(READY_SECONDS):
                    await better.channel.channel_ready()
                    is_ready = True
            if not is_ready or self._channels.get(key) is not opened:
                await better.let_go().close()
                if not isinstance(found, str):
                    await found.close()
                await self._clock.sleep(READY_SECONDS)
                continue
            self._channels[key] = better
            self._spawn(_close([opened.let_go()], UNUSED_SECONDS))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def bind_server(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """Have a server, made with SERVER_OPTIONS, listen. Port 0 takes a free one; without credentials there is no TLS.

    Args:
        host: IP address; empty for all of this machine's, of IPv4 and IPv6.

    Returns:
        The port.

    Raises:
        ValueError: the port is in use, or the host is no address of this machine.
    """
    host = host or "::"
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        raise ValueError(
            f"cannot listen on {address}: the port is in use, or the address is not this machine's; choose another"
        ) from None


def abort_code(error: SwarmError) -> grpc.StatusCode:
    """The status a call ends with when its servicer raises `error`."""
    return _CODES.get(type(error), grpc.StatusCode.UNKNOWN)


async def send(context: Any, message: Any, seconds: float = MESSAGE_SECONDS) -> None:
    """Write a message of a stream of which `context` is the ServicerContext.

    Raises:
        DeadlineExceeded: the caller takes nothing.
    """
    try:
        async with asyncio.timeout(seconds):
            await context.write(message)
    except TimeoutError:
        raise errors.DeadlineExceeded(f"the caller took nothing for {seconds:.0f} s") from None


async def receive(context: Any, seconds: float = MESSAGE_SECONDS) -> Any:
    """The next message of a stream of which `context` is the ServicerContext; None at its end.

    Raises:
        DeadlineExceeded: the caller sends nothing.
    """
    try:
        async with asyncio.timeout(seconds):
            message = await context.read()
    except TimeoutError:
        raise errors.DeadlineExceeded(f"no message for {seconds:.0f} s") from None
    return None if message is grpc.aio.EOF else message


async def abort(context: Any, error: SwarmError) -> NoReturn:
    """End a call of which `context` is the ServicerContext, so that the caller's `translate` gives the same error."""
    metadata = [(_ERROR_KEY, type(error).__name__)]
    if isinstance(error, errors.Overloaded):
        metadata.append((_ARGUMENT_KEY, repr(error.retry_after_seconds)))
    elif isinstance(error, errors.RoundMismatch):
        metadata.append((_ARGUMENT_KEY, str(error.peer_round)))
    await context.abort(abort_code(error), str(error), tuple(metadata))
    raise AssertionError("abort does not return")


def translate(error: grpc.aio.AioRpcError) -> SwarmError:
    """What a failed call means: what its servicer raised, or that the peer is out of reach, or was too slow."""
    metadata = {str(key): value for key, value in error.trailing_metadata() or ()}
    name, argument = metadata.get(_ERROR_KEY), metadata.get(_ARGUMENT_KEY, "0")
    details = error.details() or error.code().name
    error_class = _CLASSES.get(str(name))
    try:
        if error_class is errors.Overloaded:
            return errors.Overloaded(details, retry_after_seconds=float(argument))
        if error_class is errors.RoundMismatch:
            return errors.RoundMismatch(details, peer_round=int(argument))
    except ValueError:
        return errors.PeerUnavailable(f"a malformed error: {details}")
    if error_class is not None:
        return error_class(details)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(details)
    # There is no connection and so no peer, unless the attempt timed out, as it does where a network is parted.
    is_gone = "failed to connect" in details and not _TIMED_OUT.search(details)
    is_unreachable = error.code() is grpc.StatusCode.UNAVAILABLE
    return errors.PeerUnavailable(f"{error.code().name}: {details}", is_gone=is_gone, is_unreachable=is_unreachable)


async def _close(channels: Iterable[grpc.aio.Channel], grace_seconds: float | None) -> None:
    await asyncio.gather(*(channel.close(grace_seconds) for channel in channels))
