"""TLS between peers: every server shows its own certificate, every client pins the one that was announced.

Used by channels and by the programs that start servers. In an open run a certificate is right if it is the one in the
peer's signed record, and callers show none. In a locked run both sides also show that a token of the owner has issued
their certificates, or the handshake fails. Which peer may call what is decided by guard.
"""

import grpc

from swarm.credentials.certificates import PEER_NAME, first_pem
from swarm.credentials.identity import Identity

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
    """Credentials with which a client talks to the one server that has the key to this certificate.

    Args:
        own: the caller's identity; servers of a locked run are shown its certificates.
    """
    # Of a chain only the server's own certificate is pinned. With the token's too, any peer with that token would pass.
    root = first_pem(certificate_pem).encode()
    if own is None or own.authority is None:
        return grpc.ssl_channel_credentials(root_certificates=root)
    return grpc.ssl_channel_credentials(
        root_certificates=root, private_key=own.key_pem.encode(), certificate_chain=own.certificate_pem.encode()
    )
