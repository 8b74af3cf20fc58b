"""TLS with pinned certificates, over real servers."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from swarm.credentials import identity
from swarm.rpc import tls

SERVER, OTHER = identity.generate(), identity.generate()


async def _echo(request: bytes, context: object) -> bytes:
    return request


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = grpc.aio.server()
    handlers: Any = {"Echo": grpc.unary_unary_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials(SERVER))
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def _echoed(channel: grpc.aio.Channel) -> object:
    call: Any = channel.unary_unary("/test/Echo")
    return await call(b"hello", timeout=5)


async def _call(address: str, credentials: grpc.ChannelCredentials) -> object:
    async with grpc.aio.secure_channel(address, credentials, options=tls.PINNED_OPTIONS) as channel:
        return await _echoed(channel)


async def test_the_announced_certificate_passes(address: str) -> None:
    assert await _call(address, tls.pinned_credentials(SERVER.certificate_pem)) == b"hello"


async def test_another_certificate_is_refused(address: str) -> None:
    """The certificate is refused although it bears the same name."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _call(address, tls.pinned_credentials(OTHER.certificate_pem))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_no_authority_of_this_machine_vouches_for_a_peer(address: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await _call(address, grpc.ssl_channel_credentials())


async def test_a_client_in_the_clear_is_refused(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await _echoed(channel)
