"""A peer and where its gRPC server is: PEER_ID@HOST:PORT, of which an invite holds one or several.

The id makes it safe to copy: a peer that answers has to show that id's certificate before anything is sent to it.
"""

import asyncio
import ipaddress
import os
import re
import ssl
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import grpc
from cryptography.exceptions import InvalidSignature

from swarm.credentials import certificates
from swarm.credentials.identity import Identity
from swarm.errors import IntegrityError, PeerUnavailable
from swarm.rpc import tls
from swarm.rpc.endpoint import endpoint_of, host_and_port
from swarm.rpc.tls import CLIENT_OPTIONS
from swarm.types import HOST_PATTERN, TUNNEL, PeerId

_ENTRY = re.compile(rf"(?P<peer_id>[0-9a-f]{{40}})@(?P<host>{HOST_PATTERN}):(?P<port>[0-9]{{1,5}})")


@dataclass(frozen=True)
class Entry:
    peer_id: PeerId
    endpoint: str

    def __str__(self) -> str:
        return f"{self.peer_id}@{self.endpoint}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises ValueError, whose message is one line, if the text is no entry."""
        match = _ENTRY.fullmatch(text)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ValueError(
                f"{text!r} is no peer's address: copy the whole of it from a swarm-peer's log, PEER_ID@HOST:PORT"
            )
        return cls(PeerId(match["peer_id"]), f"{match['host']}:{match['port']}")

    @classmethod
    def at(cls, peer_id: PeerId, host: str, port: int) -> Self:
        """A peer at a host, given by name or IP address. Raises ValueError as `parse` does."""
        return cls.parse(f"{peer_id}@{endpoint_of(host, port)}")

    @property
    def host(self) -> str:
        return host_and_port(self.endpoint)[0]

    @property
    def port(self) -> int:
        return host_and_port(self.endpoint)[1]

    async def connect(self, own: Identity, *, insecure: bool) -> grpc.aio.Channel:
        """Open a channel to this very peer; with `insecure`, without TLS, the id is not checked. Cancellation leaves
        nothing behind.

        Raises PeerUnavailable if no peer answers there, or another one, or one that uses TLS and should not, or the
        other way round; ValueError if the run is locked, and there is no token.
        """
        if insecure:
            await self._require_no_tls()
        certificate_pem = None if insecure else await self.certificate(own)
        return tls.open_channel(self.endpoint, certificate_pem, own, CLIENT_OPTIONS)

    async def _require_no_tls(self) -> None:
        """Raise PeerUnavailable if the peer uses TLS: gRPC would only say that the connection was closed."""
        try:
            await shown_certificate(self.host, self.port)
        except OSError:
            return
        raise PeerUnavailable(f"the peer at {self.endpoint} uses TLS: leave out --insecure")

    async def certificate(self, own: Identity | None) -> str:
        """Fetch the certificate of this very peer, to pin it. Raises as `connect` does."""
        try:
            certificate_pem = await shown_certificate(self.host, self.port)
        except OSError as error:
            # asyncio has words of its own for every refusal, with the address in them.
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
            raise PeerUnavailable(
                f"no swarm-peer answers at {self.endpoint} ({reason}): check the address, that its "
                f"port is open, and that it was started without --insecure{_proxy_advice()}"
            ) from None
        if id_of(certificate_pem) != self.peer_id:
            raise PeerUnavailable(
                f"another peer answers at {self.endpoint}: it restarted under a new identity, so copy its present "
                "address"
            )
        if (own is None or own.authority is None) and not _is_self_signed(certificate_pem):
            raise ValueError(f"the run at {self} is locked: ask its owner for a token, and come with {self}#TOKEN")
        return certificate_pem


async def shown_certificate(host: str, port: int) -> str:
    """Fetch the certificate of the server at an address; TLS proves that the server has its key. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Nothing is verified here, since callers compare the certificate with an id. gRPC would have to verify it first.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # With an earlier TLS a locked run's server would refuse us before it has shown anything.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    # A post-quantum key would make the first TLS message fill a packet, but `passes_long` needs a short message.
    context.set_ecdh_curve("prime256v1")
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        # An orderly end of TLS waits for an answer of the server, and some servers never answer.
        writer.transport.abort()
    return ssl.DER_cert_to_PEM_cert(shown)


def id_of(certificate_pem: str) -> PeerId | None:
    """The id of the peer with this certificate; None if it is no peer's."""
    try:
        return certificates.peer_id_of(certificate_pem)
    except IntegrityError:
        return None


def _proxy_advice() -> str:
    """What a user may not expect whose downloads go through a proxy; empty if none is set."""
    names = [name for name in ("https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY") if os.environ.get(name)]
    return f"; {names[0]} is used for downloads, and not to reach peers" if names else ""


def _is_self_signed(certificate_pem: str) -> bool:
    """Whether a certificate is one of an open run; in a locked run a token has signed it."""
    certificate = certificates.load(certificate_pem)
    try:
        certificate.verify_directly_issued_by(certificate)
    except (InvalidSignature, *certificates.FAULTS):
        return False
    return True


def tunnel_through(meeting_point: Entry) -> str:
    return f"{TUNNEL}{meeting_point}"


def meeting_point_of(endpoint: str) -> Entry | None:
    """The meeting point through which an endpoint leads; None if it is reached directly. Raises ValueError."""
    return Entry.parse(endpoint.removeprefix(TUNNEL)) if endpoint.startswith(TUNNEL) else None


def points_of(endpoints: Iterable[str]) -> list[Entry]:
    """The meeting points through which these endpoints lead, each once. What is no endpoint is left out."""
    found = dict[Entry, None]()
    for endpoint in endpoints:
        with suppress(ValueError):
            if (point := meeting_point_of(endpoint)) is not None:
                found[point] = None
    return list(found)


def where(endpoint: str) -> str:
    """An endpoint in words for people: `at HOST:PORT`, or `by way of HOST:PORT` if a meeting point there leads on."""
    return f"by way of {endpoint.rpartition('@')[2]}" if endpoint.startswith(TUNNEL) else f"at {endpoint}"


def direct(endpoints: Iterable[str]) -> list[str]:
    return [endpoint for endpoint in endpoints if not endpoint.startswith(TUNNEL)]


def versions(endpoints: Iterable[str]) -> set[int]:
    """The versions of IP, 4 or 6, by which direct endpoints are reached; a name counts for both."""
    found = set[int]()
    for endpoint in endpoints:
        try:
            found.add(ipaddress.ip_address(host_and_port(endpoint)[0]).version)
        except ValueError:
            found |= {4, 6}
    return found
