"""Results of later rounds: rebuilt as they were, in turns, and refused where they cannot be right."""

import asyncio
from collections.abc import Callable

import pytest
import torch

from swarm.averaging.agreement.messages import Standing, lineage_after
from swarm.errors import IntegrityError, MalformedMessage, Overloaded
from swarm.rpc.transfers import HOLD_SECONDS
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerRecord
from tests.averaging.doubles import record
from tests.averaging.holder import NUM_BYTES, Line, holder, line_to, queueing_line, transfer_over
from tests.support.virtual_time import in_virtual_time

pytestmark = pytest.mark.usefixtures("small_segments")


@in_virtual_time
async def test_later_rounds_are_given_to_one_after_the_other_whoever_fetches_a_snapshot() -> None:
    line, turns = queueing_line(1)
    donor = holder(line, 1)
    await donor.offer()
    begun = donor.standing
    expected = [donor.commit().after for _ in range(3)]
    first, early, late = (transfer_over(line, n).results(record(1), begun, max_bytes=NUM_BYTES) for n in (90, 91, 91))
    async with turns.turn("another"):
        assert (await anext(first))[0].after == expected[0]
        with pytest.raises(Overloaded, match="1 other downloads first"):
            await anext(early)
        assert [c.after async for c, _ in first] == expected[1:]
        await asyncio.sleep(HOLD_SECONDS)
        assert [c.after async for c, _ in late] == expected


async def applied(line: Line, donor: PeerRecord, standing: Standing, *, max_bytes: int = NUM_BYTES) -> list[Standing]:
    stream = transfer_over(line).results(donor, standing, max_bytes=max_bytes)
    return [committed.after async for committed, _ in stream]


@in_virtual_time
async def test_results_are_rebuilt_as_they_were() -> None:
    line = line_to(1)
    donor = holder(line, 1)
    await donor.offer()
    begun = donor.standing
    expected = [donor.commit(0.25 * number) for number in range(3)]
    results = [committed async for committed, _ in transfer_over(line).results(record(1), begun, max_bytes=NUM_BYTES)]
    assert [r.after for r in results] == [e.after for e in expected]
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours.result.tensors["state"], theirs.result.tensors["state"])
        assert (await ours.state_digest, ours.outcome) == (await theirs.state_digest, theirs.outcome)
        for name in ("round", "num_samples", "squared_norm", "total_squared_norm", "members", "lineage", "digest"):
            assert getattr(ours.result, name) == getattr(theirs.result, name)


def another_past(reply: pb.DownloadReply) -> None:
    reply.result.outcome.prepared.member_ids.append("more")


def too_far(reply: pb.DownloadReply) -> None:
    reply.result.standing.round += 1


def flipped(reply: pb.DownloadReply) -> None:
    if reply.data:
        reply.data = b"\1" + reply.data[1:]


def huge(reply: pb.DownloadReply) -> None:
    if reply.HasField("result"):
        reply.result.tensors[0].shape[0] <<= 50
        reply.result.tensors[0].num_bytes <<= 50


def clipped_by_less(reply: pb.DownloadReply) -> None:
    if reply.HasField("result"):
        outcome = reply.result.outcome
        outcome.total_squared_norm = -1.0
        reply.result.standing.lineage = lineage_after("00", outcome)


def clipped_by_nan(reply: pb.DownloadReply) -> None:
    if reply.HasField("result"):
        outcome = reply.result.outcome
        outcome.total_squared_norm = float("nan")
        reply.result.standing.lineage = lineage_after("00", outcome)


def of_no_attempt(reply: pb.DownloadReply) -> None:
    reply.result.outcome.prepared.ClearField("ballot")


def of_a_leader_with_a_long_name(reply: pb.DownloadReply) -> None:
    reply.result.outcome.prepared.ballot.leader_id *= 65


def out_of_order(reply: pb.DownloadReply) -> None:
    if reply.HasField("result"):
        reply.data = b"early"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (another_past, MalformedMessage), (too_far, MalformedMessage), (huge, MalformedMessage),
        (clipped_by_less, MalformedMessage), (clipped_by_nan, MalformedMessage), (of_no_attempt, MalformedMessage),
        (of_a_leader_with_a_long_name, MalformedMessage),
        (out_of_order, MalformedMessage), (flipped, IntegrityError),
    ],
)  # fmt: skip
@in_virtual_time
async def test_wrong_results_are_refused(change: Callable[[pb.DownloadReply], None], error: type[Exception]) -> None:
    line = line_to(1)
    donor = holder(line, 1)
    await donor.offer()
    begun = donor.standing
    donor.commit()

    def tamper(_: str, reply: pb.DownloadReply) -> None:
        if reply.WhichOneof("message") == "result" or change is flipped:
            change(reply)

    line.tamper = tamper
    with pytest.raises(error):
        await applied(line, record(1), begun)
