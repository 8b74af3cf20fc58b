"""One attempt: which member is blamed for silence, and what another member may send."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm.averaging.agreement.messages import Ballot, MemberFailed, Refused
from swarm.averaging.agreement.shares import Shares, divide
from swarm.averaging.own_round import Attempt
from swarm.averaging.vectors.allreduce import Reduction
from swarm.averaging.vectors.exchange import Closed, Closing
from swarm.averaging.wire.transport import Payload
from swarm.compression.codec import simple_codec
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Contribution
from tests.averaging.doubles import make_context, peer_id, record
from tests.support.virtual_time import in_virtual_time, virtual_loop

FP32 = simple_codec("fp32")
OWN, OTHER = peer_id(1), peer_id(2)


def two_members() -> Shares:
    """The shares of two members in a vector of four elements."""
    begun = dict.fromkeys((OWN, OTHER), pb.BeginReply(num_samples=1, num_targets=1, round_samples=1, norm=1.0))
    return divide(begun, num_elements=4, tile=1, clip_to_median=0.0)


def attempt_with(exchanges: Any) -> Attempt:
    """An attempt of a member with a frozen contribution."""
    contribution = Contribution(tensors={}, num_samples=1, num_targets=1, round_samples=1, committed=frozenset())
    closed = Closed(contribution=contribution, vector_D=torch.zeros(4), norm=0.0)
    closing = Closing(frozenset(), "", exchanges, began_at=0.0)
    closing.end(closed)
    return Attempt(make_context(record(1)), ballot=Ballot(1, OWN), closing=closing)


@in_virtual_time
async def test_a_peer_that_stood_still_blames_nobody_for_the_silence() -> None:
    shares = two_members()
    reduction = Reduction(shares, OWN, codec=FP32, result_codec=FP32)

    async def run(*_: object) -> object:
        return await reduction.result()

    exchanges: Any = SimpleNamespace(open=lambda closed, shares: reduction, run=run)
    attempt = attempt_with(exchanges)
    attempt.open(shares)
    transport: Any = None
    exchanging = asyncio.create_task(attempt.exchange(shares, transport, 1000.0))
    await asyncio.sleep(0.2)
    virtual_loop().advance(100.0)  # This imitates a process that was stopped.
    await asyncio.sleep(0.2)
    assert not exchanging.done()
    with pytest.raises(MemberFailed, match="nothing of its contribution came") as failed:
        await exchanging
    assert failed.value.peer_id == OTHER


@in_virtual_time
async def test_a_member_does_not_send_its_part_again_while_that_is_taken_in() -> None:
    shares = two_members()
    reduction = Reduction(shares, OWN, codec=FP32, result_codec=FP32)
    reduction.add_decoded(OWN, torch.zeros(2))
    exchanges: Any = SimpleNamespace(open=lambda closed, shares: reduction)
    attempt = attempt_with(exchanges)
    attempt.open(shares)

    async def pieces() -> AsyncIterator[bytes]:
        yield bytes(FP32.encode(torch.ones(2)))

    calls = (attempt.serve(OTHER, shares.digest, pieces()) for _ in range(2))
    first, second = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, Payload)
    assert FP32.decode(first.encoded, 2).tolist() == [0.5, 0.5]
    assert isinstance(second, Refused)
    assert await attempt.serve(OTHER, shares.digest, pieces()) == first, "it may ask again for an answer that was lost"


@in_virtual_time
async def test_a_slow_member_still_gets_the_sum_of_an_exchange_after_which_another_one_began() -> None:
    shares, later = two_members(), divide(
        {OWN: pb.BeginReply(num_samples=1, num_targets=1), OTHER: pb.BeginReply()},
        num_elements=4, tile=1, clip_to_median=0.0,
    )  # fmt: skip
    reductions = {each.digest: Reduction(each, OWN, codec=FP32, result_codec=FP32) for each in (shares, later)}
    exchanges: Any = SimpleNamespace(open=lambda closed, shares: reductions[shares.digest])
    attempt = attempt_with(exchanges)

    async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    early = asyncio.create_task(attempt.serve(OTHER, later.digest, pieces()))
    await asyncio.sleep(0.1)
    for each in (shares, later):
        attempt.open(each)
        reductions[each.digest].add_decoded(OWN, torch.full((2,), 3.0))
    late = await attempt.serve(OTHER, shares.digest, pieces(bytes(FP32.encode(torch.ones(2)))))
    assert FP32.decode(late.encoded, 2).tolist() == [2.0, 2.0]
    assert FP32.decode((await early).encoded, 2).tolist() == [3.0, 3.0]
    attempt.end("it is over")
    with pytest.raises(Refused, match="it is over"):
        await attempt.serve(OTHER, "of other members", pieces())
