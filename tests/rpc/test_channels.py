"""Channels, ports and errors, over real servers."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from swarm import errors
from swarm.credentials import identity
from swarm.rpc import channels, tls
from swarm.rpc.channels import ChannelPool
from swarm.rpc.failures import abort, abort_code, translate
from swarm.rpc.tls import client_options
from swarm.types import PeerRecord, PeerState
from tests.support.chain import eventually
from tests.support.manual_clock import ManualClock
from tests.support.meeting import echo
from tests.support.proxy import Direction, Proxy

SERVER, OTHER = identity.generate(), identity.generate()

Handler = Callable[[bytes, Any], Awaitable[bytes]]
Serve = Callable[..., Awaitable[int]]


@pytest.fixture
async def insecure_pool() -> AsyncIterator[ChannelPool]:
    pool = ChannelPool(insecure=True)
    yield pool
    await pool.close()


def _record(port: int, certificate_pem: str = "") -> PeerRecord:
    return PeerRecord(
        peer_id=SERVER.peer_id, announced_at=0.0, stage=0, endpoint=f"127.0.0.1:{port}",
        certificate_pem=certificate_pem, state=PeerState.SERVING,
    )  # fmt: skip


async def _call(channel: grpc.aio.Channel, request: bytes = b"hello", *, seconds: float = 10.0) -> Any:
    return await echo(channel, request, seconds=seconds, waits=False)


# -- channels --------------------------------------------------------------------------------------------------------


async def test_a_channel_is_pinned_to_the_record(serve: Serve, pool: ChannelPool) -> None:
    port = await serve(credentials=tls.server_credentials(SERVER))
    assert await _call(pool.channel(_record(port, SERVER.certificate_pem))) == b"hello"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _call(pool.channel(_record(port, OTHER.certificate_pem)))
    assert isinstance(translate(caught.value), errors.PeerUnavailable)


async def test_no_record_of_another_peer_changes_where_a_peer_is_called(serve: Serve, pool: ChannelPool) -> None:
    dead, own_end = "127.0.0.1:1", f"127.0.0.1:{await serve(credentials=tls.server_credentials(SERVER))}"
    hidden = f"tunnel:{OTHER.peer_id}@{dead}"
    for endpoints in ((dead, own_end), (hidden, own_end)):
        first, *others = endpoints
        record = _record(1, SERVER.certificate_pem).model_copy(
            update={"endpoint": first, "other_endpoints": tuple(others)}
        )
        forged = record.model_copy(
            update={"peer_id": OTHER.peer_id, "other_endpoints": (dead, hidden), "announced_at": 1e9}
        )
        pool.channel(record)
        pool.channel(forged, bulk=True)
        assert await _call(pool.channel(record)) == b"hello"
        assert pool.channel(forged) is not pool.channel(record)


@pytest.mark.parametrize("endpoint", ["a" * 40, "a..b:1", f"{'a' * 64}.example:1", "a@b:1", "tunnel:a@b:1"])
def test_a_record_names_hosts_and_ports_alone(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        PeerRecord.model_validate(_record(1).model_dump() | {"endpoint": endpoint})


async def test_tls_is_for_all_or_none(pool: ChannelPool, insecure_pool: ChannelPool) -> None:
    with pytest.raises(errors.PeerUnavailable, match=r"^this peer uses TLS and 127.0.0.1:1 does not: use --insecure"):
        pool.channel(_record(1))
    with pytest.raises(errors.PeerUnavailable, match=r"^127.0.0.1:1 uses TLS and this peer does not: use --insecure"):
        insecure_pool.channel(_record(1, SERVER.certificate_pem))


@pytest.mark.parametrize("secure", [False, True])
async def test_who_accepts_a_connection_and_says_nothing_is_out_of_reach_and_not_gone(
    monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    """A frozen peer's machine does this."""
    monkeypatch.setattr(channels, "CLIENT_OPTIONS", client_options(100, 200))
    pool = ChannelPool(insecure=not secure)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        record = _record(silent.getsockname()[1], SERVER.certificate_pem if secure else "")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _call(pool.channel(record))
    error = translate(caught.value)
    assert isinstance(error, errors.PeerUnavailable)
    assert (error.is_unreachable, error.is_gone) == (True, False)
    await pool.close()


async def test_a_short_call_does_not_wait_behind_a_bulk_transfer(serve: Serve, insecure_pool: ChannelPool) -> None:
    async with Proxy("127.0.0.1", await serve()) as proxy:
        record = _record(proxy.port)
        short, bulk = insecure_pool.channel(record), insecure_pool.channel(record, bulk=True)
        proxy.links[Direction.TO_SERVER].bytes_per_second = 3e5
        # The transfer takes longer than a channel for short calls would wait for the answer to a ping.
        transfer = asyncio.create_task(_call(bulk, bytes(1_100_000), seconds=60.0))
        await eventually(lambda: proxy.links[Direction.TO_SERVER].num_bytes > 200_000)
        assert await _call(short) == b"hello"
        assert not transfer.done()
        assert len(await transfer) == 1_100_000


async def test_large_tensors_use_the_short_channel_only_where_others_arrived_soon(
    serve: Serve, insecure_pool: ChannelPool
) -> None:
    record, num_bytes = _record(await serve()), 1 << 20
    assert not insecure_pool.patience(record, channels.SHORT_BYTES).is_needed
    assert insecure_pool.patience(record, num_bytes).is_needed
    insecure_pool.transferred(record, channels.SOON_SECONDS / 2)
    await eventually(lambda: not insecure_pool.patience(record, num_bytes).is_needed)
    assert insecure_pool.is_connected(record)
    for _ in range(3):
        insecure_pool.transferred(record, 60.0)
    assert not insecure_pool.patience(record, num_bytes).is_needed, "the process at the other end may have been busy"
    insecure_pool.transferred(record, 60.0)
    assert insecure_pool.patience(record, num_bytes).is_needed
    insecure_pool.transferred(record, channels.SOON_SECONDS / 2)
    assert not insecure_pool.patience(record, num_bytes).is_needed
    insecure_pool.lost(record)
    assert insecure_pool.patience(record, num_bytes).is_needed


async def test_channels_that_nobody_uses_are_closed_once_their_calls_are_done(serve: Serve) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow(request: bytes, context: Any) -> bytes:
        begun.set()
        await may_end.wait()
        return request

    clock = ManualClock()
    pool = ChannelPool(insecure=True, clock=clock)
    vanishing, staying = _record(await serve(slow)), _record(await serve())
    old, kept = pool.channel(vanishing), pool.channel(staying)
    call = asyncio.create_task(_call(old))
    await begun.wait()
    clock.advance(channels.UNUSED_SECONDS)
    assert pool.channel(staying) is kept
    pool.channel(staying, bulk=True)
    may_end.set()
    assert await call == b"hello"
    await eventually(lambda: old.get_state() is grpc.ChannelConnectivity.SHUTDOWN)
    assert pool.channel(staying) is kept
    assert await _call(pool.channel(vanishing)) == b"hello"
    await pool.close()


FROZEN = """
import asyncio, sys, grpc
from swarm.rpc.serving import SERVER_OPTIONS, bind_server

async def sleep(request, context):
    await asyncio.sleep(60)

async def main():
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(sleep)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    print(bind_server(server, "127.0.0.1", 0, None), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


async def test_a_frozen_server_is_noticed_and_a_slow_one_left_alone(
    insecure_pool: ChannelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "CLIENT_OPTIONS", client_options(200, 2000))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FROZEN), stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        channel = insecure_pool.channel(_record(int(await process.stdout.readline())))
        call = asyncio.create_task(_call(channel, seconds=30.0))
        await asyncio.sleep(2.5)  # A ping was answered in this time, or the connection would have been broken.
        assert not call.done()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        # Its deadline would have been another error.
        assert isinstance(translate(caught.value), errors.PeerUnavailable)
    finally:
        process.kill()
        await process.wait()


# -- errors ----------------------------------------------------------------------------------------------------------


def _leaves(kind: type[errors.SwarmError]) -> list[type[errors.SwarmError]]:
    below = [one for one in kind.__subclasses__() if one.__module__ == errors.__name__]
    return [leaf for one in below for leaf in _leaves(one)] or [kind]


def _failing(error: errors.SwarmError) -> Handler:
    async def fail(request: bytes, context: Any) -> bytes:
        await abort(context, error)

    return fail


async def _received(serve: Serve, pool: ChannelPool, handler: Handler, seconds: float = 10.0) -> errors.SwarmError:
    channel = pool.channel(_record(await serve(handler)))
    try:
        await _call(channel, seconds=seconds)
    except grpc.aio.AioRpcError as error:
        return translate(error)
    raise AssertionError("the call did not fail")


@pytest.mark.parametrize("kind", _leaves(errors.SwarmError))
async def test_an_error_arrives_as_it_was_raised(
    serve: Serve, insecure_pool: ChannelPool, kind: type[errors.SwarmError]
) -> None:
    more = {"retry_after_seconds": 0.25} if kind is errors.Overloaded else {}
    make: Any = kind
    error = make("NaN in ä tensor", **more)
    received = await _received(serve, insecure_pool, _failing(error))
    assert type(received) is kind
    assert (str(received), vars(received)) == (str(error), vars(error))
    assert abort_code(error) is not grpc.StatusCode.UNKNOWN


async def test_a_missed_deadline_is_slowness_and_a_bug_makes_its_peer_unavailable(
    serve: Serve, insecure_pool: ChannelPool
) -> None:
    async def slow(request: bytes, context: Any) -> bytes:
        await asyncio.sleep(5)
        return request

    async def broken(request: bytes, context: Any) -> bytes:
        raise KeyError("bug")

    assert isinstance(await _received(serve, insecure_pool, slow, seconds=0.1), errors.DeadlineExceeded)
    assert isinstance(await _received(serve, insecure_pool, broken), errors.PeerUnavailable)


def _with_metadata(*metadata: tuple[str, str]) -> Any:
    async def fail(request: bytes, context: Any) -> bytes:
        with contextlib.suppress(grpc.aio.AbortError):
            await context.abort(grpc.StatusCode.INTERNAL, "nonsense", metadata)
        return b""

    return fail


@pytest.mark.parametrize(("name", "argument"), [("Overloaded", "soon"), ("SystemExit", "0")])
async def test_nonsense_for_an_error_is_an_unavailable_peer(
    serve: Serve, insecure_pool: ChannelPool, name: str, argument: str
) -> None:
    fail = _with_metadata(("swarm-error", name), ("swarm-error-argument", argument))
    assert type(await _received(serve, insecure_pool, fail)) is errors.PeerUnavailable


@pytest.mark.parametrize("argument", ["nan", "inf", "-inf", "-1", "1e308"])
async def test_who_claims_to_be_busy_for_ever_is_asked_again(
    serve: Serve, insecure_pool: ChannelPool, argument: str
) -> None:
    fail = _with_metadata(("swarm-error", "Overloaded"), ("swarm-error-argument", argument))
    error = await _received(serve, insecure_pool, fail)
    assert isinstance(error, errors.Overloaded)
    assert 0.0 <= error.retry_after_seconds <= errors.LONGEST_BUSY_SECONDS
