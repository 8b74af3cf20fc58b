"""What peers say of themselves when many are asked at once: which answers count, and which are waited for."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from swarm.credentials.identity import generate
from swarm.errors import DeadlineExceeded, PeerUnavailable
from swarm.machine.clock import SystemClock
from swarm.routing.poll import Poll
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PeerRecord, PeerState
from tests.support.describing import describing

STAGE = 1
DEAD = PeerRecord(peer_id="f" * 40, announced_at=0.0, stage=STAGE, endpoint="127.0.0.1:1", state=PeerState.SERVING)


@pytest.fixture
async def channels() -> AsyncIterator[ChannelPool]:
    pool = ChannelPool(insecure=True)
    yield pool
    await pool.close()


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        (pb.DescribeReply(run_id="run", stage=STAGE, round=6), True),
        (pb.DescribeReply(run_id="run", stage=STAGE + 1, round=6), False),
        (pb.DescribeReply(run_id="other", stage=STAGE, round=6), False),
        (pb.DescribeReply(run_id="run", stage=STAGE, round=1 << 58), False),
        (pb.DescribeReply(run_id="run", stage=STAGE, round=6, loop_lag_seconds=math.nan), False),
    ],
    ids=["it is there", "another stage by now", "another run by now", "a round that nobody counts to", "no number"],
)
async def test_only_a_peer_of_this_stage_that_makes_sense_answers(
    said: pb.DescribeReply, counts: bool, channels: ChannelPool
) -> None:
    async with describing(STAGE, lambda _: said) as record:
        heard = await Poll("run", channels).ask([DEAD, record])
        replies = await Poll("run", channels).replies([DEAD, record])
    assert [one.record for one in heard] == [DEAD, record]
    assert [one.fault is None for one in heard] == [False, counts]
    assert [reply.round for reply in replies] == [6] * counts


async def test_who_answers_is_who_was_asked_whatever_it_calls_itself(channels: ChannelPool) -> None:
    async with describing(STAGE, lambda _: pb.DescribeReply(peer_id="another", stage=STAGE)) as record:
        (reply,) = await Poll("", channels).replies([record])
    assert reply.peer_id == record.peer_id


async def test_where_nobody_can_even_be_asked_the_reason_is_raised() -> None:
    channels = ChannelPool(identity=generate(), clock=SystemClock())
    poll = Poll("run", channels)
    assert [one.was_asked for one in await poll.ask([DEAD])] == [False]
    with pytest.raises(PeerUnavailable, match="--insecure"):
        await poll.replies([DEAD])
    assert await poll.replies([]) == []
    await channels.close()


async def test_who_is_late_is_not_waited_for_once_most_of_those_that_answer_are_at_a_later_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds: dict[str, int | None] = {}

    class Channels(ChannelPool):
        def channel(self, record: PeerRecord, *, bulk: bool = False) -> Any:
            return record

    async def describe(record: Any, request: pb.DescribeRequest, *, seconds: float) -> pb.DescribeReply:
        if (number := rounds[record.peer_id]) is None:
            return await asyncio.Future()
        if number == 0:
            raise DeadlineExceeded("no answer")
        return pb.DescribeReply(stage=STAGE, round=number)

    monkeypatch.setattr("swarm.routing.poll.describe", describe)
    records = [DEAD.model_copy(update={"peer_id": f"{number:040x}"}) for number in range(3)]
    poll = Poll("", Channels(insecure=True))

    async def answered(*says: int | None, after: int | None = 5) -> list[int]:
        """Which of the peers answer at rounds `says`, where 0 is silent and None late."""
        rounds.update((record.peer_id, number) for record, number in zip(records, says, strict=True))
        heard = await asyncio.wait_for(poll.ask(records, after_round=after), 10.0)
        return [records.index(one.record) for one in heard if one.reply is not None]

    assert await answered(6, None, 6) == [0, 2]
    assert await answered(6, 5, 5) == [0, 1, 2], "one that is ahead does not end the wait for the others"
    assert await answered(6, 6, 6, after=None) == [0, 1, 2]
    assert await answered(5, 0, 0) == [0]
    assert await answered(6, None, None) == [0], "of the three one is likely to answer"
