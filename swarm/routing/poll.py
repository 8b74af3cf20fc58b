"""Asks peers of a run to describe themselves, many at the same time.

Any peer may say anything about itself. So what counts follows from several answers (see training/run_rounds.py), which
are the caller's to compare. A poll asks each peer once, and keeps no answer.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from swarm.errors import PeerUnavailable, SwarmError, WrongStage
from swarm.rpc.ask import describe
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import Block, PeerRecord

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 3.0


class Heard(NamedTuple):
    """What came of asking one peer: its reply, or why there is none. It was not even asked if it cannot be, say because
    one side has TLS and the other has not."""

    record: PeerRecord
    reply: pb.DescribeReply | None = None
    fault: SwarmError | None = None
    was_asked: bool = True


class Poll:
    def __init__(self, run_id: str, channels: ChannelPool, *, seconds: float = ANSWER_SECONDS) -> None:
        """Without a `run_id` answers of peers of any run are taken. An answer may take `seconds`, beyond the wait that
        is asked for."""
        self._run_id = run_id
        self._channels = channels
        self._seconds = seconds
        self._silent = set[str]()
        """The peers that did not answer when they were last asked."""

    async def ask(
        self, records: Sequence[PeerRecord], *, caller: pb.Incarnation | None = None, after_round: int | None = None,
        wait_seconds: float = 0.0, tally: bool = False,
    ) -> list[Heard]:  # fmt: skip
        """Ask all of these peers at once. Returns what came of it, in the order of the records.

        With `after_round` peers may wait up to `wait_seconds` until they are at a later round. Once most of the peers
        that are likely to answer are, no other answer is awaited, and those peers are left out. If the `caller` is
        named, the replies tell whether another process serves under its identity. With `tally` they have that of the
        peer's block.
        """
        num_likely, num_later = sum(record.peer_id not in self._silent for record in records), 0
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._ask(
                        record,
                        pb.DescribeRequest(
                            run_id=self._run_id, caller=caller, after_round=after_round, wait_seconds=wait_seconds,
                            stage=record.stage, variant=record.variant, tally=tally,
                        ),
                    )
                )
                for record in records
            ]  # fmt: skip
            for answered in asyncio.as_completed(tasks):
                reply = (await answered).reply
                num_later += reply is not None and after_round is not None and reply.round > after_round
                if 2 * num_later > num_likely:
                    for task in tasks:
                        task.cancel()
                    break
        return [task.result() for task in tasks if not task.cancelled()]

    async def replies(
        self, records: Sequence[PeerRecord], *, caller: pb.Incarnation | None = None
    ) -> list[pb.DescribeReply]:
        """The replies of those of these peers that answer. Raises PeerUnavailable if none of them can even be asked."""
        heard = await self.ask(records, caller=caller)
        for one in heard:
            if one.fault is not None and not any(other.was_asked for other in heard):
                raise one.fault
        return [one.reply for one in heard if one.reply is not None]

    async def _ask(self, record: PeerRecord, request: pb.DescribeRequest) -> Heard:
        try:
            channel = self._channels.channel(record)
        except PeerUnavailable as error:
            self._silent.add(record.peer_id)
            return Heard(record, fault=error, was_asked=False)
        try:
            reply = await describe(channel, request, seconds=request.wait_seconds + self._seconds)
            if (block := Block(reply.stage, reply.variant)) != record.block:
                raise WrongStage(f"it is at stage {block} by now")
        except SwarmError as error:
            logger.debug("%s does not describe itself: %s", record.peer_id, error)
            self._silent.add(record.peer_id)
            return Heard(record, fault=error)
        self._silent.discard(record.peer_id)
        # The connection proves who answers. What the answer says of that could name somebody else.
        reply.peer_id = record.peer_id
        return Heard(record, reply)
