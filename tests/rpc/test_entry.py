"""Peers entered by id and endpoint: found, mistaken for others, locked and open."""

from collections.abc import Awaitable, Callable

import grpc
import pytest

from swarm.credentials.identity import Identity, generate
from swarm.errors import PeerUnavailable
from swarm.rpc import tls
from swarm.rpc.entry import Entry
from swarm.types import PeerId
from tests.support import locked
from tests.support.meeting import echo

OPEN, ID = generate(), PeerId("0123456789abcdef" * 2 + "01234567")


Serve = Callable[..., Awaitable[int]]


async def _entry(serve: Serve, own: Identity | None) -> Entry:
    """A server with this identity, or one without TLS."""
    port = await serve(credentials=None if own is None else tls.server_credentials(own))
    return Entry(ID if own is None else own.peer_id, f"127.0.0.1:{port}")


async def _is_answered(channel: grpc.aio.Channel) -> bool:
    try:
        return await echo(channel, seconds=10.0, waits=False) == b"a"
    except grpc.aio.AioRpcError:
        return False
    finally:
        await channel.close()


@pytest.mark.parametrize(
    "text",
    ["", "192.0.2.1:4001", f"{ID}@192.0.2.1", f"{ID}@192.0.2.1:0", f"{ID}@192.0.2.1:65536", f"{ID[:-1]}@192.0.2.1:1",
     f"{ID}@2001:db8::1:1", f"{ID}@a..b:1", f"{ID}@{'a' * 64}.org:1", "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW"],
)  # fmt: skip
def test_what_is_no_entry_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no peer's address: .*PEER_ID@HOST:PORT$"):
        Entry.parse(text)


async def test_the_peer_of_that_id_is_called(serve: Serve) -> None:
    for server, caller in ((OPEN, generate()), (locked.PEER, locked.TRAINER), (OPEN, locked.TRAINER)):
        entry = await _entry(serve, server)
        assert await _is_answered(await entry.connect(caller, insecure=False))


async def test_a_peer_with_tls_is_not_called_without(serve: Serve) -> None:
    for server in (OPEN, locked.PEER):
        entry = await _entry(serve, server)
        with pytest.raises(PeerUnavailable, match=f"^the peer at {entry.endpoint} uses TLS: leave out --insecure$"):
            await entry.connect(generate(), insecure=True)


async def test_a_peer_of_another_id_is_told_nothing(serve: Serve) -> None:
    entry = Entry(ID, (await _entry(serve, OPEN)).endpoint)
    with pytest.raises(PeerUnavailable, match="another peer answers at"):
        await entry.connect(generate(), insecure=False)


async def test_a_locked_run_wants_its_own_token(serve: Serve) -> None:
    entry = await _entry(serve, locked.PEER)
    with pytest.raises(ValueError, match=r"is locked: ask its owner for a token, and come with .*#TOKEN"):
        await entry.connect(generate(), insecure=False)
    assert not await _is_answered(await entry.connect(locked.FOREIGN, insecure=False))


async def test_without_tls_both_sides_have_to_agree(serve: Serve) -> None:
    entry = await _entry(serve, None)
    assert await _is_answered(await entry.connect(generate(), insecure=True))
    with pytest.raises(PeerUnavailable, match="started without --insecure"):
        await entry.connect(generate(), insecure=False)
