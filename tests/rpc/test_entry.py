"""Peers entered by id and endpoint: found, mistaken for others, locked and open."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server

from swarm.credentials.identity import Identity, generate
from swarm.errors import PeerUnavailable
from swarm.rpc import tls
from swarm.rpc.entry import Entry
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.types import PeerId
from tests.support import locked

OPEN, ID = generate(), PeerId("0123456789abcdef" * 2 + "01234567")


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Identity | None], Awaitable[str]]]:
    """A function that starts a server of an identity, or one without TLS, and returns its endpoint."""
    servers: list[grpc.aio.Server] = []

    async def start(identity: Identity | None) -> str:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_HealthServicer_to_server(HealthServicer(), server)
        credentials = None if identity is None else tls.server_credentials(identity)
        port = bind_server(server, "127.0.0.1", 0, credentials)
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        await server.stop(None)


async def _is_answered(channel: grpc.aio.Channel) -> bool:
    stub: Any = HealthStub(channel)
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=10.0)
    except grpc.aio.AioRpcError:
        return False
    finally:
        await channel.close()
    return True


@pytest.mark.parametrize("endpoint", ["192.0.2.1:4001", "peer.example.org:1", "[2001:db8::1]:65535"])
def test_what_is_printed_can_be_read(endpoint: str) -> None:
    entry = Entry(ID, endpoint)
    assert str(entry) == f"{ID}@{endpoint}"
    assert Entry.parse(str(entry)) == entry


@pytest.mark.parametrize(
    "text",
    ["", "192.0.2.1:4001", f"{ID}@192.0.2.1", f"{ID}@192.0.2.1:0", f"{ID}@192.0.2.1:65536", f"{ID[:-1]}@192.0.2.1:1",
     f"{ID}@2001:db8::1:1", f"{ID}@a..b:1", f"{ID}@{'a' * 64}.org:1", "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW"],
)  # fmt: skip
def test_what_is_no_entry_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no peer's address: .*PEER_ID@HOST:PORT$"):
        Entry.parse(text)


async def test_the_peer_of_that_id_is_called(serve: Callable[[Identity | None], Awaitable[str]]) -> None:
    for server, caller in ((OPEN, generate()), (locked.PEER, locked.TRAINER), (OPEN, locked.TRAINER)):
        entry = Entry(server.peer_id, await serve(server))
        assert await _is_answered(await entry.connect(caller, insecure=False))


async def test_a_peer_with_tls_is_not_called_without(serve: Callable[[Identity | None], Awaitable[str]]) -> None:
    for server in (OPEN, locked.PEER):
        endpoint = await serve(server)
        with pytest.raises(PeerUnavailable, match=f"^the peer at {endpoint} uses TLS: leave out --insecure$"):
            await Entry(server.peer_id, endpoint).connect(generate(), insecure=True)
    plain = Entry(OPEN.peer_id, await serve(None))
    assert await _is_answered(await plain.connect(generate(), insecure=True))


async def test_a_peer_of_another_id_is_told_nothing(serve: Callable[[Identity | None], Awaitable[str]]) -> None:
    endpoint = await serve(OPEN)
    with pytest.raises(PeerUnavailable, match="another peer answers at"):
        await Entry(ID, endpoint).connect(generate(), insecure=False)


async def test_a_locked_run_wants_its_own_token(serve: Callable[[Identity | None], Awaitable[str]]) -> None:
    entry = Entry(locked.PEER.peer_id, await serve(locked.PEER))
    with pytest.raises(ValueError, match=r"is locked: ask its owner for a token, and come with .*#TOKEN"):
        await entry.connect(generate(), insecure=False)
    assert not await _is_answered(await entry.connect(locked.FOREIGN, insecure=False))


async def test_without_tls_both_sides_have_to_agree(serve: Callable[[Identity | None], Awaitable[str]]) -> None:
    entry = Entry(ID, await serve(None))
    assert await _is_answered(await entry.connect(generate(), insecure=True))
    with pytest.raises(PeerUnavailable, match="started without --insecure"):
        await entry.connect(generate(), insecure=False)


async def test_nobody_there_is_said_so() -> None:
    with pytest.raises(PeerUnavailable, match=r"no swarm-peer answers at 127\.0\.0\.1:1 \(Connection refused\)"):
        await Entry(ID, "127.0.0.1:1").connect(generate(), insecure=False)


async def test_where_nobody_answers_a_set_proxy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for proxy, end in (("http://127.0.0.1:1", "; http_proxy is used for downloads, and not to reach peers"), ("", "")):
        monkeypatch.setenv("http_proxy", proxy)
        with pytest.raises(PeerUnavailable, match=f"started without --insecure{end}$"):
            await Entry(ID, "127.0.0.1:1").connect(OPEN, insecure=False)
