"""A peer's Download requests to the donors of its stage, and how it reads the results of missed rounds.

Every byte of a result is checked before another part sees it. If a donor serves others first, the caller gets
Overloaded, because it may know other donors.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import Standing
from swarm.averaging.vectors.results import Committed, IncomingResult
from swarm.averaging.wire.transport import Transport
from swarm.errors import IntegrityError, MalformedMessage, PeerUnavailable
from swarm.rpc.bounds import require_bounds
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.stage_pb2 import Address
from swarm.types import PeerRecord


class Downloads:
    """One peer's requests to the donors of its stage."""

    def __init__(self, transport: Transport, *, address: Address, own_id: str, silence_seconds: float) -> None:
        """
        Args:
            silence_seconds: the longest wait for a donor's next piece.
        """
        self._transport = transport
        self._sender = pb.DownloadRequest(address=address, peer_id=own_id)
        self._silence_seconds = silence_seconds
        self.stage = address.stage

    def replies(
        self, donor: PeerRecord, request: pb.DownloadRequest, *, more_seconds: float = 0.0
    ) -> AsyncIterator[pb.DownloadReply]:
        """Send a request with the address and this peer's id added, and yield the donor's answers.

        Args:
            more_seconds: how much longer than usual the donor may be silent.
        """
        request.MergeFrom(self._sender)
        return self._transport.download(donor, request, silence_seconds=self._silence_seconds + more_seconds)

    async def results(
        self, donor: PeerRecord, standing: Standing, *, max_bytes: int
    ) -> AsyncGenerator[tuple[Committed, int], None]:
        """Yield the rounds committed after `standing`, in order, up to where the donor stands.

        Each comes with the donor's round at the time of sending.

        Args:
            max_bytes: a larger result is refused.

        Raises:
            Overloaded: the donor serves others first. Results that came before that are valid.
            NotReady: the donor does not keep these results.
            PeerUnavailable, DeadlineExceeded: the donor is gone, or was silent for too long.
            MalformedMessage, IntegrityError: the donor's answer is wrong.
        """
        wanted = pb.ResultsRequest(standing=messages.pack_standing(standing))
        incoming: IncomingResult | None = None
        async for reply in self.replies(donor, pb.DownloadRequest(results=wanted)):
            match reply.WhichOneof("message"):
                case "result" if incoming is None:
                    require_bounds(reply.result, finite=True)
                    incoming = IncomingResult(standing, reply.result, max_bytes)
                case "data" if incoming is not None:
                    incoming.feed(reply.data)
                case _:
                    raise MalformedMessage("the pieces of a result come in the wrong order")
            if incoming.is_whole:
                if await asyncio.to_thread(incoming.sha256) != incoming.header.sha256:
                    raise IntegrityError(f"the result of round {standing.round} does not match its digest")
                yield incoming.committed, incoming.header.donor_round
                standing, incoming = incoming.committed.after, None
        if incoming is not None:
            raise PeerUnavailable(f"the result of round {standing.round} ended early")


def name_of(donor: PeerRecord) -> str:
    """A donor's name, as logs have it."""
    return donor.name or donor.peer_id[:8]
