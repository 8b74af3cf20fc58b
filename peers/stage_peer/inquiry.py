"""Asks a few other peers to dial this one back, and sums up what they reached.

Used by reach.py, which has a server answer at this peer's port meanwhile, and decides what is announced.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence

import grpc

from peers.shared.network import Membership
from peers.stage_peer.verdict import Verdict
from swarm.dht.addresses import is_host
from swarm.errors import DeadlineExceeded, Overloaded, SwarmError
from swarm.rpc.entry import Entry, direct
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


class Inquiry:
    """The questions of one peer.

    Attributes:
        hindrance: why the last inquiry came to nothing although other peers answered something; otherwise empty.
    """

    def __init__(self, membership: Membership, rng: random.Random, *, insecure: bool) -> None:
        self.hindrance = ""
        self._membership = membership
        self._rng = rng
        self._insecure = insecure

    async def verdict(self, others: Sequence[PeerRecord] | Sequence[Entry], request: pb.CheckRequest) -> Verdict | None:
        """Sum up what some of the other peers reached; None if none of them has dialled back.

        Args:
            others: the other peers, each with a direct endpoint; or meeting points that are no peers of the run.

        Cancellation ends all questions.
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
        channels = self._membership.channels
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
                if not await passes_long(channel(), "" if self._insecure else end):
                    self.hindrance = SHORT_ALONE
                    return None
            for _ in range(NUM_TRIES):
                with contextlib.suppress(Overloaded):
                    return await check(channel(), request, seconds=ANSWER_SECONDS)
                # The asked peer has just dialled back another peer behind the same router.
                await self._membership.clock.sleep(GAP_SECONDS * (1.0 + self._rng.random()))
            self.hindrance = self.hindrance or BUSY
        except DeadlineExceeded:
            self.hindrance = self.hindrance or BUSY
        except SwarmError as error:
            logger.debug("%s does not dial back: %s", end, error)
        return None
