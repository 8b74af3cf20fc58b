"""Calls from one exchange to the other members. A call ends as soon as the called member falls silent.

Made by exchanging/participant for each exchange; implements AllReduceTransport.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from swarm.averaging.context import Context
from swarm.averaging.exchanging.reduction import Payload
from swarm.compression.codec import Buffer
from swarm.errors import PeerUnavailable, SwarmError
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerRecord


@dataclass(frozen=True, kw_only=True)
class OtherMembers:
    """The members with which one exchange is made."""

    context: Context
    records: Mapping[str, PeerRecord]
    opening: pb.ExchangeOpen
    timeout_seconds: float
    silence_seconds: float
    """How long a member may send nothing, if it need not wait for other members."""

    async def exchange(self, peer_id: str, part: Buffer, reply_bytes: int, *, waits: bool = True) -> Payload:
        peer = self.records[peer_id]
        silence: list[str] = []

        async def watch(scope: asyncio.Timeout) -> None:
            try:
                await self._watch(peer)
            except SwarmError as error:
                silence.append(str(error))
                scope.reschedule(asyncio.get_running_loop().time())

        try:
            # No task group: it would keep an exception that passes through it in a reference cycle, with all frames and
            # their vectors.
            async with asyncio.timeout(None) as scope:
                watching = asyncio.create_task(watch(scope))
                try:
                    return await self.context.transport.exchange(
                        peer,
                        self.opening,
                        part,
                        reply_bytes=reply_bytes,
                        timeout_seconds=self.timeout_seconds,
                        silence_seconds=None if waits else self.silence_seconds,
                    )
                finally:
                    watching.cancel()
                    del watching, scope  # They would make a reference cycle too.
        except TimeoutError:
            if not silence:
                raise
            raise PeerUnavailable(silence[0]) from None

    async def _watch(self, peer: PeerRecord) -> None:
        """Ping a member again and again. Raise SwarmError once it does not answer, long before the exchange's
        deadline."""
        timing = self.context.timing
        while True:
            await self.context.clock.sleep(timing.heartbeat_seconds)
            await self.context.transport.ping(peer, timeout_seconds=timing.report_seconds)
