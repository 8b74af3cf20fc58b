"""How a connection between peers is made: TLS, how large a message may be, and how soon a silent peer is noticed.

Every server shows its own certificate, and every client pins the one in the peer's signed record. In a locked run both
sides also show that a token of the owner has issued their certificates, or the handshake fails.
"""

import os

import grpc

from swarm.credentials.certificates import PEER_NAME, first_pem
from swarm.credentials.identity import Identity

Options = tuple[tuple[str, int | str], ...]

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Size of one message; tensors travel in chunks of about 1 MiB."""


def pings(silence_ms: int, answer_ms: int) -> Options:
    """Options with which a connection is pinged after a silence while it has calls, and is broken if the answer takes
    too long."""
    return (
        ("grpc.keepalive_time_ms", silence_ms),
        # On Linux TCP also breaks the connection if what was sent does not arrive for so long (TCP_USER_TIMEOUT).
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.max_pings_without_data", 0),
        # By default a minute, which would override the keepalive timeout.
        ("grpc.http2.ping_timeout_ms", answer_ms),
    )


def client_options(silence_ms: int, answer_ms: int) -> Options:
    """Options of a channel that sends a ping after a silence, and is broken if the answer takes too long.

    An attempt to connect is given up after both together: a frozen peer's machine accepts connections, but is silent.
    No proxy of http_proxy or https_proxy is used, since peers are often in one building with it or on this machine.
    """
    return (
        # The benches hold back the swarm's calls by grpc_proxy, which nothing but gRPC looks at.
        ("grpc.enable_http_proxy", int("grpc_proxy" in os.environ)),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        *pings(silence_ms, answer_ms),
        # Whatever its name says, this is the time for one attempt to connect. The default is 20 s.
        ("grpc.min_reconnect_backoff_ms", silence_ms + answer_ms),
        # A peer that restarts is reached again in a second, not in minutes; callers make pauses of their own.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1000),
    )


CLIENT_OPTIONS: Options = client_options(1000, 2000)
BULK_OPTIONS: Options = (
    # A ping waits behind the megabytes in the kernel's buffer, which takes seconds where a slow line is shared.
    *client_options(20_000, 20_000),
    # Without this the channel would share its connection with every other channel to the same address.
    ("grpc.use_local_subchannel_pool", 1),
)


def through(proxy: str) -> Options:
    """Options with which a proxy at HOST:PORT opens a channel's connections. They have to stand before the channel's
    others, because of two values gRPC takes the first."""
    return (("grpc.enable_http_proxy", 1), ("grpc.http_proxy", f"http://{proxy}"))


PINNED_OPTIONS = (("grpc.ssl_target_name_override", PEER_NAME),)
"""Options of a channel with pinned credentials: all certificates bear one name, wherever their servers run."""


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """Credentials with which a peer's server proves its identity, and in a locked run makes callers prove theirs."""
    own = [(identity.key_pem.encode(), identity.certificate_pem.encode())]
    if identity.authority is None:
        return grpc.ssl_server_credentials(own)
    owner = identity.authority.certificate_pem.encode()
    return grpc.ssl_server_credentials(own, root_certificates=owner, require_client_auth=True)


def pinned_credentials(certificate_pem: str, own: Identity | None = None) -> grpc.ChannelCredentials:
    """Credentials with which a client talks to the one server that has the key to this certificate. `own` is the
    caller's identity; servers of a locked run are shown its certificates."""
    # Of a chain only the server's own certificate is pinned. With the token's too, any peer with that token would pass.
    root = first_pem(certificate_pem).encode()
    if own is None or own.authority is None:
        return grpc.ssl_channel_credentials(root_certificates=root)
    return grpc.ssl_channel_credentials(
        root_certificates=root, private_key=own.key_pem.encode(), certificate_chain=own.certificate_pem.encode()
    )


def open_channel(
    endpoint: str, certificate_pem: str | None, own: Identity | None, options: Options
) -> grpc.aio.Channel:
    """A channel to the one server that has this certificate; if it is None, a channel without TLS."""
    if certificate_pem is None:
        return grpc.aio.insecure_channel(endpoint, options=options)
    credentials = pinned_credentials(certificate_pem, own)
    return grpc.aio.secure_channel(endpoint, credentials, options=(*options, *PINNED_OPTIONS))
