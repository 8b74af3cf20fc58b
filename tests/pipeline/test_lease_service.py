"""A stage's leader answering trainers: what it grants them, and when it has nothing for them."""

import random
from typing import Any

from swarm.clock import ManualClock
from swarm.pipeline.lease_service import GroupLead, LeaseServicer
from swarm.pipeline.leases import GATHER_SECONDS, RoundView
from swarm.rpc.v1 import lease_pb2 as pb
from swarm.rpc.v1.stage_pb2 import Address
from swarm.types import PROTOCOL_VERSION, PeerId
from tests.support.chain import SYNCHRONOUS


async def acquire(stage: int, round_number: int, **fields: Any) -> pb.AcquireReply:
    """What the leader of a stage answers that is at a round and lacks all of it, but for the very last one."""
    last = (round_number + 1) * SYNCHRONOUS.microbatches_per_round - 1
    view = RoundView(
        round=round_number, committed={last}, counted={last}, lost=set(), highest_microbatch=-1, quiet_seconds=60.0,
        awaits_reports=False, replay_seconds=0.0, complete=False,
    )  # fmt: skip
    clock = ManualClock()
    servicer = LeaseServicer(
        config=SYNCHRONOUS, stage=stage, clock=clock, rng=random.Random(0),
        lead=lambda: GroupLead(leader_id=PeerId("me"), view=view),
    )  # fmt: skip
    address = Address(run_id=SYNCHRONOUS.run_id, protocol_version=PROTOCOL_VERSION, stage=stage)
    request = pb.AcquireRequest(address=address, trainer_id="trainer", count=2, **fields)
    for _ in range(2):
        assert not (await servicer.Acquire(request, None)).microbatches, "it has just taken the lead"
        clock.advance(GATHER_SECONDS / 2)
    return await servicer.Acquire(request, None)


async def test_a_stage_has_what_it_lacks_replayed() -> None:
    reply = await acquire(1, 3, newest_round=3, newest_is_complete=True)
    first = 3 * SYNCHRONOUS.microbatches_per_round
    assert (list(reply.microbatches), reply.accumulate_only_at) == ([first, first + 1], 1)


async def test_what_stage_0_has_still_to_grant_is_not_lost() -> None:
    assert not (await acquire(1, 3, newest_round=3)).microbatches
    assert (await acquire(1, 2, newest_round=3)).microbatches, "stage 0 has committed that round"


async def test_a_trainer_is_told_what_another_one_ran_meanwhile() -> None:
    last = SYNCHRONOUS.microbatches_per_round - 1
    assert list((await acquire(0, 0, holding=[0, last])).counted) == [last]


async def test_what_stage_0_has_not_begun_is_not_lost() -> None:
    """A stage may be a round ahead of one that repeats the last: nobody could run what it waits for."""
    reply = await acquire(1, 4, newest_round=3)
    assert (list(reply.microbatches), reply.round) == ([], 4)
