"""Calls to several members at once: a leader's to all of its group, and an exchange's to the other members.

None of them waits for a member that has fallen silent.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarm.averaging.agreement.rules import Timing
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import Caller, Method, Payload, Reply, Request
from swarm.compression.codec import Buffer
from swarm.errors import PeerUnavailable, SwarmError
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId, PeerRecord

Members = Mapping[PeerId, PeerRecord]


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """How a leader reaches its members.

    Attributes:
        is_silent: tells whether a peer has been silent for so long that it must be frozen or gone. A peer that is
            merely busy goes on reporting.
    """

    call: Caller
    is_silent: Callable[[PeerId], bool]
    timing: Timing

    async def __call__(
        self,
        members: Members,
        method: Method[Request, Reply],
        requests: Mapping[PeerId, Request],
        timeout_seconds: float,
        *,
        until: Callable[[Reply | SwarmError], bool] = lambda reply: True,
    ) -> dict[PeerId, Reply | SwarmError]:
        """Call all members at once. Returns the answers and errors that came in time.

        Args:
            until: tells whether an answer is acceptable. After one that is not, the other members get only a moment
                more.
        """

        async def one(peer: PeerId) -> Reply | SwarmError:
            try:
                return await self.call(members[peer], method, requests[peer], timeout_seconds=timeout_seconds)
            except SwarmError as error:
                return error

        replies: dict[PeerId, Reply | SwarmError] = {}
        async with asyncio.TaskGroup() as group:
            tasks = {group.create_task(one(peer)): peer for peer in members}
            time = asyncio.get_running_loop().time
            pending, listens_since, gives_up_at = set(tasks), time(), math.inf
            while pending and time() < gives_up_at:
                waits_since, seconds = time(), min(self.timing.heartbeat_seconds, gives_up_at - time())
                done, pending = await asyncio.wait(pending, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                # In the order of the members, because the order of a set of tasks changes from run to run.
                replies |= {peer: task.result() for task, peer in tasks.items() if task in done}
                if time() - waits_since > seconds + self.timing.heartbeat_seconds:
                    # This peer itself was frozen, so the silence of others may only mean that their messages wait here.
                    listens_since = time()
                has_listened = time() - listens_since >= self.timing.fresh_seconds
                silent = [task for task in tasks if task in pending and has_listened and self.is_silent(tasks[task])]
                replies |= {
                    tasks[task]: PeerUnavailable("it has fallen silent", is_unreachable=True) for task in silent
                }
                pending.difference_update(silent)
                if (done or silent) and not all(map(until, replies.values())):
                    gives_up_at = time() + self.timing.grace_seconds
            for task in tasks:
                task.cancel()
        return replies


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
