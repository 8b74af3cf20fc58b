"""One peer's calls to others. After a failed call the called peer is suspected; a call to itself needs no network.

Used by members/survey, leading/barrier and, through leading/broadcast, by leading/leader. Never retries.
"""

import asyncio
from dataclasses import dataclass

from swarm.averaging.context import Context
from swarm.averaging.exchanging.participant import Participant
from swarm.averaging.members.roster import Roster
from swarm.averaging.transport import Method, Reply, Request
from swarm.errors import DeadlineExceeded, NotReady, PeerUnavailable
from swarm.types import PeerId, PeerRecord


@dataclass(eq=False)
class Calls:
    """A Caller, see averaging/transport."""

    context: Context
    roster: Roster
    participant: Participant
    """Answers the calls that this peer, as the leader, makes to itself."""

    async def __call__(
        self, peer: PeerRecord, method: Method[Request, Reply], request: Request, *, timeout_seconds: float
    ) -> Reply:
        """Call a peer, or this one. A peer of this stage that cannot be reached is suspected.

        Raises the error that the peer answers with, PeerUnavailable or DeadlineExceeded.
        """
        if peer.peer_id == self.context.own_id:
            return await self._ask_itself(method, request, timeout_seconds)
        try:
            return await self.context.transport.call(peer, method, request, timeout_seconds=timeout_seconds)
        except (PeerUnavailable, NotReady) as error:
            if peer.stage == self.context.own.stage:
                is_gone = isinstance(error, PeerUnavailable) and error.is_gone
                self.roster.suspect(PeerId(peer.peer_id), is_gone=is_gone)
                self.context.changes.signal()  # Other parts need not wait for that peer any more.
            raise

    async def _ask_itself(self, method: Method[Request, Reply], request: Request, timeout_seconds: float) -> Reply:
        try:
            async with asyncio.timeout(timeout_seconds):
                reply: Reply = await self.participant.answers[method.name](request)
        except TimeoutError:
            raise DeadlineExceeded(f"{method.name} took longer than {timeout_seconds:.1f} s here") from None
        self.context.changes.signal()
        return reply
