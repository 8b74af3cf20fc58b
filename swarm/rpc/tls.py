"""TLS between peers: every server shows its own certificate, every client pins the one that was announced.

Used by channels and by the programs that start servers. There is no authority: a certificate is right if it is the
one in the peer's signed record. Never asks for a client's certificate.
"""

import grpc

from swarm.identity import CERTIFICATE_NAME, Identity

PINNED_OPTIONS = (("grpc.ssl_target_name_override", CERTIFICATE_NAME),)
"""Options of a channel with pinned credentials: all certificates bear one name, wherever their servers run."""


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """What a peer's server proves its identity with."""
    return grpc.ssl_server_credentials([(identity.key_pem.encode(), identity.certificate_pem.encode())])


def pinned_credentials(certificate_pem: str) -> grpc.ChannelCredentials:
    """What a client uses to talk to the one server that holds the key to this certificate."""
    return grpc.ssl_channel_credentials(root_certificates=certificate_pem.encode())
