"""When a round is complete in each setting, who may commit it, and when a stage's round ends early: because another
stage is further, or has waited for it."""

from functools import partial

import pytest

from swarm.averaging.agreement.messages import Standing
from swarm.averaging.averager import Averager
from swarm.averaging.watch import has_quorum, is_complete
from swarm.types import Block, PeerRecord, PeerState
from tests.averaging.doubles import QUICK, make_context, record
from tests.averaging.fake_stage import FakeStage, make_config
from tests.support.chain import DILOCO, SYNCHRONOUS
from tests.support.virtual_time import in_virtual_time


def averaging_with(*others: PeerRecord, num_stages: int = 3) -> Averager:
    """The averaging of a stage's only peer, which has learnt something in its round."""
    member = FakeStage()
    member.learn(0)
    context = make_context(
        record(1),
        lambda block: [other for other in others if other.block == block],
        config=make_config("diloco", stages=num_stages),
    )
    return Averager(context, member)


def at_round(number: int, stage: int, state: PeerState = PeerState.SERVING) -> PeerRecord:
    return record(10 + stage, stage).model_copy(update={"round": number, "state": state})


@in_virtual_time
async def test_a_stage_follows_another_one_that_is_further() -> None:
    """Otherwise its rounds would stay behind for good, and all stages would have no anchor in common."""
    assert averaging_with(at_round(1, stage=2)).watch.view().complete
    assert not averaging_with(at_round(0, stage=2)).watch.view().complete


@in_virtual_time
async def test_one_peer_that_says_any_round_pulls_nobody_along() -> None:
    liar = record(20, 2).model_copy(update={"round": 1 << 47})
    assert not averaging_with(at_round(0, stage=2), liar).watch.view().complete
    assert not averaging_with(at_round(0, stage=0), liar, num_stages=4).watch.view().complete
    assert not averaging_with(at_round(0, stage=0), at_round(0, stage=2), liar).watch.view().complete


@in_virtual_time
async def test_nobody_is_pulled_along_faster_than_the_run_can_go() -> None:
    """Here all peers of the other stages say a round that no run reaches."""
    averager = averaging_with(at_round(1 << 47, stage=2))
    before = averager.place.standing
    after = Standing(run_samples=before.run_samples + 16, round=before.round, lineage="ab")
    averager.place.branches.committed(after)
    assert not averager.watch.view().complete


@pytest.mark.parametrize(
    "other",
    [
        at_round(9, stage=0),
        at_round(9, stage=1, state=PeerState.LEAVING),
        at_round(9, stage=2, state=PeerState.JOINING),
    ],
    ids=["its own stage", "it leaves", "it joins"],
)
@in_virtual_time
async def test_neither_its_own_stage_nor_a_peer_that_does_not_serve_pulls_a_stage_along(other: PeerRecord) -> None:
    assert not averaging_with(other).watch.view().complete


@in_virtual_time
async def test_a_stage_that_another_has_waited_for_goes_on_with_what_it_has() -> None:
    """Otherwise it might get no more samples: the other stage lets the samples of one round through, and then no
    more."""
    averager = averaging_with()
    now = averager.context.clock.monotonic()
    averager.place.awaited(now - QUICK.awaited_seconds / 2)
    assert not averager.watch.view().complete
    averager = averaging_with()
    averager.place.awaited(now - QUICK.awaited_seconds)
    averager.place.awaited(now)
    assert averager.watch.view().complete


@in_virtual_time
async def test_a_single_stage_waits_for_all_its_samples() -> None:
    assert not averaging_with(num_stages=1).watch.view().complete


# -- completeness ----------------------------------------------------------------------------------------------------


def test_synchronous_wants_every_microbatch_of_the_round() -> None:
    complete = partial(is_complete, SYNCHRONOUS, Block(0))
    size = SYNCHRONOUS.microbatches_per_round
    second, before = range(size, 2 * size), SYNCHRONOUS.rounds.round_samples
    assert complete(before, frozenset(second), 0)
    assert not complete(before, frozenset(second) - {size}, 10**6)
    assert not complete(before, frozenset(range(size)), 10**6)
    assert not complete(0, frozenset({0}), 1, is_late=lambda: True)


def test_diloco_wants_the_rounds_samples_whichever_they_are() -> None:
    complete = partial(is_complete, DILOCO, Block(0))
    wanted = DILOCO.rounds.round_samples
    assert complete(7, frozenset(), wanted)
    assert not complete(7, frozenset(range(100)), wanted - 1)


def test_a_stage_that_lost_samples_goes_on_with_what_it_has_once_it_is_late() -> None:
    """Otherwise its rounds would stay behind the others' for good, and all stages would have no anchor in common."""
    complete = partial(is_complete, DILOCO, Block(0))
    assert complete(3, frozenset(), 1, is_late=lambda: True)
    assert not complete(3, frozenset(), 0, is_late=lambda: True), "there is nothing to average"
    assert not complete(3, frozenset(), 1, is_late=lambda: False)


def test_a_member_that_holds_most_of_a_round_is_not_left_out_of_it() -> None:
    complete, wanted = partial(is_complete, DILOCO, Block(0)), DILOCO.rounds.round_samples
    assert complete(0, frozenset(), wanted, absent_samples=wanted)
    assert not complete(0, frozenset(), wanted, absent_samples=wanted + 1)


def test_a_round_ends_early_with_everybody_or_not_at_all() -> None:
    """Otherwise a newcomer's first step might end the round in place of the member that has nearly all of it."""
    complete, wanted = partial(is_complete, DILOCO, Block(0)), DILOCO.rounds.round_samples
    assert not complete(3, frozenset(), wanted - 1, absent_samples=1, is_late=lambda: True)


# -- quorum ----------------------------------------------------------------------------------------------------------


def test_available_takes_whoever_is_there() -> None:
    assert has_quorum("available", ["a"], last_members=["a", "b", "c"], announced=lambda: ["a", "b", "c"])


def test_majority_wants_most_of_the_last_rounds_members() -> None:
    last = ["a", "b", "c", "d"]
    assert has_quorum("majority", ["a", "b", "c", "x"], last_members=last, announced=list)
    assert not has_quorum("majority", ["a", "b", "x", "y", "z"], last_members=last, announced=list), "half is not most"


def test_before_any_round_those_who_are_announced_count() -> None:
    assert has_quorum("majority", ["a", "b"], last_members=(), announced=lambda: ["a", "b", "c"])
    assert not has_quorum("majority", ["a"], last_members=(), announced=lambda: ["a", "b", "c"])
