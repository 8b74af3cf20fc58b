"""Microbatches that a synchronous stage has lost are leased again, for that stage alone. Those that may only be late
are not."""

import pytest

from swarm.pipeline.leases import (
    LONGEST_GATHER_SECONDS,
    LONGEST_QUIET_SECONDS,
    LOST_SECONDS,
    SETTLE_SECONDS,
    SHOWN_SECONDS,
)
from swarm.types import Block
from tests.pipeline.leader import SIZE, SYNCHRONOUS, Leader


def test_what_was_finished_but_is_counted_by_nobody_is_replayed_at_this_stage_only() -> None:
    leader = Leader(SYNCHRONOUS)
    leader.give("a", SIZE)
    leader.committed = {0, 1, 2, 4}
    assert leader.give("a", 9, acknowledged=range(SIZE)) == []
    leader.clock.advance(SETTLE_SECONDS)
    assert leader.give("a", 9, quiet_seconds=SETTLE_SECONDS / 2) == [], "acks may still be under way"
    grant = leader.ask("a", 9, quiet_seconds=SETTLE_SECONDS)
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([3, 5], 0)


def test_a_later_stage_grants_only_what_it_lacks() -> None:
    leader = Leader(SYNCHRONOUS, block=Block(1))
    leader.committed = {0, 1, 2, 3}
    assert leader.give("a", 9) == []
    grant = leader.ask("a", 1, quiet_seconds=SETTLE_SECONDS)
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([4], 1)
    assert leader.give("b", 9, quiet_seconds=SETTLE_SECONDS) == [5], "the other one is leased"


@pytest.mark.parametrize("all_granted", [False, True])
def test_a_later_stage_waits_for_what_stage_0_has_not_committed_yet(all_granted: bool) -> None:
    leader = Leader(SYNCHRONOUS, block=Block(1))
    leader.committed = {0, 1}
    assert leader.give("a", 9, quiet_seconds=60.0, all_granted=all_granted, all_committed=False) == []


@pytest.mark.parametrize("stage", [0, 1])
def test_what_died_with_its_member_is_replayed_while_the_round_goes_on(stage: int) -> None:
    leader = Leader(SYNCHRONOUS, block=Block(stage))
    leader.committed, leader.lost = {0}, {1, 2}
    grant = leader.ask("a", 9, all_granted=False)
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([1, 2], stage)
    leader.round, leader.committed, leader.lost = 1, set(), set()
    assert leader.ask("a", 9, all_granted=False).accumulate_only_at is None, "another round, in which nothing is lost"


def test_who_may_not_replay_what_is_lost_gets_something_new() -> None:
    """The trainer that ran the lost microbatches is busy with one of them, and there is more to do."""
    leader = Leader(SYNCHRONOUS)
    leader.give("a", 2)
    leader.ask("a", 1, acknowledged=[0, 1])
    leader.clock.advance(SHOWN_SECONDS)
    leader.lost = {0, 1}
    assert leader.give("a", 1) == [0]
    grant = leader.ask("b", 2)
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([2, 3], None)


def test_what_a_later_stage_does_not_have_long_after_stage_0_is_replayed_while_the_round_goes_on() -> None:
    leader = Leader(SYNCHRONOUS, block=Block(2))
    leader.committed = {0}
    told = [0, 1, 3, SIZE]
    assert leader.give("a", 9, all_granted=False, acknowledged=told) == []
    leader.clock.advance(LOST_SECONDS - 1.0)
    assert leader.give("a", 9, all_granted=False, acknowledged=told) == [], "hearing of it again changes nothing"
    leader.committed = {0, 3}
    leader.clock.advance(1.0)
    grant = leader.ask("a", 9, all_granted=False)
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([1], 2)
    assert leader.give("a", 9, all_granted=False) == [], "its replay may be lost as well, but not at once"
    leader.clock.advance(LOST_SECONDS)
    assert leader.give("a", 9, all_granted=False) == [1]


@pytest.mark.parametrize("reason", ["a peer has not told yet", "a member does not answer"])
def test_what_another_member_may_have_is_not_lost(reason: str) -> None:
    leader = Leader(SYNCHRONOUS, block=Block(1))
    if reason == "a member does not answer":
        leader.counted = {4}
    leader.give("a", 9, all_granted=False, acknowledged=[1])
    leader.clock.advance(2 * LOST_SECONDS)
    silent = reason == "a peer has not told yet"
    assert leader.give("a", 9, all_granted=False, awaits_reports=silent) == []
    leader.counted.clear()
    assert leader.give("a", 9, all_granted=False) == [1]


def test_a_replay_is_not_granted_again_while_its_ack_may_be_under_way() -> None:
    leader = Leader(SYNCHRONOUS, block=Block(1))
    leader.committed, leader.lost = {0}, {1}
    assert leader.give("a", 9) == [1]
    assert leader.give("a", 9) == []
    leader.clock.advance(SHOWN_SECONDS)
    assert leader.give("a", 9) == [1], "it came to nothing"


def test_what_may_come_back_is_replayed_once_there_is_nothing_new_to_do() -> None:
    leader = Leader(SYNCHRONOUS, block=Block(1))
    leader.committed, leader.counted = {2, 3}, {0, 1}
    assert leader.give("a", 9, all_granted=False, all_committed=False) == []
    assert leader.give("a", 9, awaits_reports=True, all_committed=False) == []
    assert leader.give("a", 9, all_committed=False) == [0, 1], "while 4 and 5 are still on their way"
    assert leader.give("a", 9, all_committed=False) == []
    leader.clock.advance(SETTLE_SECONDS)
    assert leader.give("a", 9, all_committed=False) == [], "they may not show yet"
    leader.clock.advance(SHOWN_SECONDS - SETTLE_SECONDS)
    assert leader.give("a", 9, all_committed=False) == [0, 1]


def test_stage_0_says_when_there_is_nothing_new_to_do() -> None:
    leader = Leader(SYNCHRONOUS)
    assert not leader.ask("a", 0).all_granted
    assert not leader.ask("a", 4).all_granted
    leader.committed, leader.counted = {2, 3}, {0, 1}
    assert leader.give("a", 2, holding=[0, 1, 2, 3]) == [4, 5]
    assert leader.ask("a", 0, holding=[0, 1, 4, 5]).all_granted
    assert leader.give("a", 9, holding=[4, 5]) == [], "they were done with just now"
    leader.clock.advance(SHOWN_SECONDS)
    grant = leader.ask("a", 9, holding=[4, 5])
    assert (list(grant.microbatches), grant.all_granted) == ([0, 1], True)


def test_a_peer_that_never_tells_what_it_has_is_not_waited_for_for_ever() -> None:
    """The leader can reach that peer, but the peer cannot reach the leader."""
    leader = Leader(SYNCHRONOUS, block=Block(1), led_seconds=LONGEST_GATHER_SECONDS)
    leader.committed = {0, 1, 2, 3, 4}
    assert leader.give("a", 9, awaits_reports=True, quiet_seconds=LONGEST_QUIET_SECONDS - 1) == []
    assert leader.give("a", 9, awaits_reports=True, quiet_seconds=LONGEST_QUIET_SECONDS) == [5]


def test_what_a_silent_member_had_is_replayed_though_another_has_not_told_what_it_has() -> None:
    leader = Leader(SYNCHRONOUS, block=Block(1), led_seconds=LONGEST_GATHER_SECONDS)
    leader.committed, leader.counted = {2, 3, 4, 5}, {0}
    assert leader.give("a", 9, quiet_seconds=9.0, awaits_reports=True) == [0]
    assert leader.give("a", 9, quiet_seconds=9.0, awaits_reports=True, holding=[0]) == []
