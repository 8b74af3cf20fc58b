"""Opens connections to meeting points. Each use has a connection of its own, so that bytes of one use do not hold up
another.

A meeting point's certificate is asked for once, and then pinned. If this process is itself the meeting point, it calls
the waiting peer without any connection: a router often does not lead from within to its own outer address.
"""

from collections.abc import Awaitable, Callable

import grpc

from swarm.credentials.identity import Identity
from swarm.rpc import tls
from swarm.rpc.entry import Entry
from swarm.rpc.meeting.carrying import Line
from swarm.rpc.tls import BULK_OPTIONS, Options
from swarm.types import PeerId


class Points:
    """The meeting points that one process has been connected to."""

    def __init__(self, own: Identity | None, *, insecure: bool, run_id: str = "") -> None:
        """
        Args:
            run_id: the run of this process, which meeting points are told; empty while that is not known.
        """
        self.run_id = run_id
        self._own = own
        self._insecure = insecure
        self._certificates: dict[Entry, str] = {}
        self._open_here: Callable[[PeerId], Awaitable[Line]] | None = None

    def serve_here(self, open_line: Callable[[PeerId], Awaitable[Line]]) -> None:
        """From now on this process is a meeting point, and `open_line` connects it to a peer that waits here."""
        self._open_here = open_line

    def here(self, point: Entry) -> Callable[[PeerId], Awaitable[Line]] | None:
        """What connects to the peers that wait at a meeting point, if it is this process; None if it is another."""
        return self._open_here if self._own is not None and point.peer_id == self._own.peer_id else None

    async def connect(self, point: Entry, options: Options = BULK_OPTIONS, *, target: str = "") -> grpc.aio.Channel:
        """Open a new channel to a meeting point.

        Args:
            options: of the channel. With those for bulk transfers it shares no connection with other channels.
            target: what to connect to instead of the meeting point's endpoint.

        Raises:
            PeerUnavailable: the meeting point does not answer, or another peer does.
            ValueError: the run is locked, and there is no token.
        """
        target = target or point.endpoint
        if self._insecure:
            return grpc.aio.insecure_channel(target, options=options)
        certificate_pem = self._certificates.get(point)
        if certificate_pem is None:
            certificate_pem = self._certificates[point] = await point.certificate(self._own)
        credentials = tls.pinned_credentials(certificate_pem, self._own)
        return grpc.aio.secure_channel(target, credentials, options=(*options, *tls.PINNED_OPTIONS))

    def forget(self, point: Entry) -> None:
        """Drop a meeting point's certificate, so that the next connection asks for it: it may have changed."""
        self._certificates.pop(point, None)
