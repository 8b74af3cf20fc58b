"""TLS with pinned certificates, over real servers."""

from collections.abc import Awaitable, Callable

import grpc
import pytest

from swarm.credentials import identity
from swarm.rpc import tls
from tests.support.meeting import echo

SERVER, OTHER = identity.generate(), identity.generate()


@pytest.mark.parametrize(
    ("credentials", "passes"),
    [
        (tls.pinned_credentials(SERVER.certificate_pem), True),
        (tls.pinned_credentials(OTHER.certificate_pem), False),  # It bears the same name.
        (grpc.ssl_channel_credentials(), False),
        (None, False),
    ],
    ids=["announced", "another's", "an authority of this machine's", "in the clear"],
)
async def test_the_announced_certificate_alone_passes(
    serve: Callable[..., Awaitable[int]], credentials: grpc.ChannelCredentials | None, passes: bool
) -> None:
    address = f"127.0.0.1:{await serve(credentials=tls.server_credentials(SERVER))}"
    channel = (
        grpc.aio.insecure_channel(address)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=tls.PINNED_OPTIONS)
    )
    async with channel:
        if passes:
            assert await echo(channel) == b"a"
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echo(channel, waits=False)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
