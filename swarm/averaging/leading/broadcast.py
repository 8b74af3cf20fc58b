"""Calling all members of a group at once, without waiting for those that have fallen silent.

Used by leading/leader, for all of its calls.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarm.averaging.timing import Timing
from swarm.averaging.transport import Caller, Method, Reply, Request
from swarm.errors import PeerUnavailable, SwarmError
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
