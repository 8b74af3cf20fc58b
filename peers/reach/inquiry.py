"""Asks a few other peers to dial this one back, and sums up which of its addresses they reached."""

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import grpc

from swarm.dht.addresses import is_host
from swarm.errors import DeadlineExceeded, Overloaded, SwarmError
from swarm.machine.clock import Clock
from swarm.rpc.channels import ChannelPool
from swarm.rpc.endpoint import endpoint_of
from swarm.rpc.entry import Entry, direct, versions
from swarm.rpc.meeting.check import ANSWER_SECONDS, DIAL_SECONDS, GAP_SECONDS, check
from swarm.rpc.probe import SHORT_ALONE, passes_long
from swarm.rpc.v1 import meeting_pb2 as pb
from swarm.types import PeerRecord

logger = logging.getLogger(__name__)

NUM_ASKED = 3
"""The number of peers that are asked to dial back."""
NUM_TRIES = 4
"""How often a peer is asked in all, if it answers each time that it has no time."""
BUSY = "those that are to dial it back have no time now, and are asked again"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    endpoints: tuple[str, ...]
    """Direct endpoints that were reached, the best first. If there are any, the endpoints that no peer could try
    follow."""
    dht_endpoints: tuple[str, ...]
    """The endpoints of the DHT's node that were reached, in the same order."""
    num_asked: int
    num_reached: int
    """How many peers dialled back, and how many of them reached an endpoint."""

    @classmethod
    def unchecked(cls, endpoints: tuple[str, ...]) -> Self:
        return cls(endpoints=endpoints, dht_endpoints=(), num_asked=0, num_reached=0)

    @property
    def is_hidden(self) -> bool:
        return self.num_reached < self.num_asked

    @property
    def needs_tunnels(self) -> bool:
        """Whether some peers need a meeting point to reach this one: it is hidden, or is reached by one version of IP
        only, so that peers that have only the other one need a meeting point that has both."""
        return self.is_hidden or len(versions(self.endpoints)) < 2

    @classmethod
    def of(cls, named: pb.CheckRequest, replies: Sequence[pb.CheckReply]) -> Self:
        """Sum up the answers.

        An endpoint that this peer named counts if one peer reached it. An endpoint at the address from which this peer
        was seen to call counts if more than half of the peers reached it. An endpoint that none of them could try,
        because they have another version of IP, stays named. Other endpoints in the answers are ignored.
        """
        untried = [end for end in (*named.endpoints, *named.dht_endpoints) if all(end in r.untried for r in replies)]
        return cls(
            endpoints=_reached(named.endpoints, [(reply.observed_host, reply.endpoints) for reply in replies], untried),
            dht_endpoints=_reached(
                named.dht_endpoints, [(reply.observed_host, reply.dht_endpoints) for reply in replies], untried
            ),
            num_asked=len(replies),
            num_reached=sum(bool(reply.endpoints) for reply in replies),
        )

    def is_doubtful(self, former: Self | None) -> bool:
        """Whether others should soon be asked again: an endpoint is no longer reached, was not reached at the first
        attempt, or has become reachable. Each of these may be an accident."""
        if former is None:
            return not (self.endpoints and self.dht_endpoints)
        return self.endpoints != former.endpoints or bool(self.dht_endpoints) != bool(former.dht_endpoints)


def _reached(
    named: Sequence[str], told: Sequence[tuple[str, Sequence[str]]], untried: Sequence[str]
) -> tuple[str, ...]:
    own = [end for end in named if not end.startswith(":") and any(end in reached for _, reached in told)]
    seen = Counter(
        endpoint
        for host, reached in told
        for port in (int(end[1:]) for end in named if end.startswith(":"))
        if (endpoint := endpoint_of(host, port)) in reached
    )
    reached = dict.fromkeys([*own, *(end for end, count in seen.items() if 2 * count > len(told))])
    return (*reached, *(end for end in named if reached and end in untried))


class Inquiry:
    def __init__(self, channels: ChannelPool, clock: Clock, rng: random.Random) -> None:
        self.hindrance = ""
        """Why the last inquiry came to nothing although other peers answered something; otherwise empty."""
        self._channels = channels
        self._clock = clock
        self._rng = rng

    async def verdict(self, others: Sequence[PeerRecord] | Sequence[Entry], request: pb.CheckRequest) -> Verdict | None:
        """Sum up what some of the other peers reached; None if none of them has dialled back. `others` are the other
        peers, each with a direct endpoint; or meeting points that are no peers of the run. Cancellation ends all
        questions.
        """
        self.hindrance = ""
        asked = self._rng.sample(list[PeerRecord | Entry](others), min(NUM_ASKED, len(others)))
        told = [reply for reply in await self._replies(asked, request) if is_host(reply.observed_host)]
        if not told:
            return None
        self.hindrance = ""
        return Verdict.of(request, told)

    async def _replies(self, asked: Sequence[PeerRecord | Entry], request: pb.CheckRequest) -> list[pb.CheckReply]:
        """The replies of the peers that dial back. After the first reply the others have as long as dialling takes."""
        told = list[pb.CheckReply]()
        left = {asyncio.ensure_future(self._ask(record, request)) for record in asked}
        try:
            while left:
                patience = DIAL_SECONDS + 0.5 if told else None
                done, left = await asyncio.wait(left, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                told += [reply for task in done if (reply := task.result()) is not None]
        finally:
            for task in left:
                task.cancel()
        return told

    async def _ask(self, asked: PeerRecord | Entry, request: pb.CheckRequest) -> pb.CheckReply | None:
        """The reply of one peer; None if the peer is silent or busy, or if only short messages reach it."""
        channels = self._channels
        if isinstance(asked, PeerRecord):
            # Each call gets the channel from the pool again, because the pool may have replaced it by a better one.
            return await self._answer(lambda: channels.channel(asked), direct(asked.endpoints)[0], request)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                channel = await channels.points.connect(asked)
        except (SwarmError, TimeoutError, ValueError) as error:
            logger.debug("%s does not dial back: %s", asked, error)
            return None
        try:
            return await self._answer(lambda: channel, asked.endpoint, request)
        finally:
            await channel.close()

    async def _answer(
        self, channel: Callable[[], grpc.aio.Channel], end: str, request: pb.CheckRequest
    ) -> pb.CheckReply | None:
        try:
            with contextlib.suppress(Overloaded):
                if not await passes_long(channel(), "" if self._channels.is_insecure else end):
                    self.hindrance = SHORT_ALONE
                    return None
            for _ in range(NUM_TRIES):
                with contextlib.suppress(Overloaded):
                    return await check(channel(), request, seconds=ANSWER_SECONDS)
                # The asked peer has just dialled back another peer behind the same router.
                await self._clock.sleep(GAP_SECONDS * (1.0 + self._rng.random()))
            self.hindrance = self.hindrance or BUSY
        except DeadlineExceeded:
            self.hindrance = self.hindrance or BUSY
        except SwarmError as error:
            logger.debug("%s does not dial back: %s", end, error)
        return None
