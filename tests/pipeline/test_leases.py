"""Leases: every microbatch is with one trainer at a time, and none is forgotten or granted for nothing."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm.config import RoundsConfig, RunConfig
from swarm.pipeline.leases import (
    GATHER_SECONDS,
    LEAST_SKIP,
    LONGEST_GATHER_SECONDS,
    MOST_SKIP,
)
from swarm.pipeline.trainers import DOUBT_SECONDS
from swarm.types import LARGEST_COUNT, LEASE_SECONDS
from tests.pipeline.leader import DILOCO, SIZE, SYNCHRONOUS, Leader


def test_a_synchronous_round_is_handed_out_once() -> None:
    leader = Leader(SYNCHRONOUS)
    assert SIZE == 6
    assert leader.give("a", 4) == [0, 1, 2, 3]
    assert leader.give("b", 4) == [4]
    assert leader.give("b", 4, holding=[4]) == [5]
    assert leader.give("b", 4, holding=[4, 5]) == []
    assert leader.give("a", 4, holding=[0, 1, 2, 3]) == []


def test_a_dead_trainers_leases_expire_and_a_living_ones_do_not() -> None:
    leader = Leader(SYNCHRONOUS)
    leader.give("dead", 2)
    leader.give("alive", 2)
    leader.clock.advance(LEASE_SECONDS / 2)
    leader.ask("alive", 0, holding=[2, 3])
    leader.clock.advance(LEASE_SECONDS / 2)
    assert leader.give("other", 2) == [0, 1]
    # The trainer that held them before cannot renew microbatches that are another's now.
    leader.clock.advance(LEASE_SECONDS / 2)
    leader.ask("dead", 0, holding=[0, 1])
    leader.clock.advance(LEASE_SECONDS / 2)
    assert set(leader.give("third", 4)) >= {0, 1}


def test_what_a_silent_trainer_holds_goes_to_one_that_has_nothing_else_to_do() -> None:
    leader = Leader(SYNCHRONOUS)
    leader.give("dead", 2)
    leader.give("alive", 2)
    leader.clock.advance(DOUBT_SECONDS / 2)
    leader.ask("alive", 0, holding=[2, 3])
    leader.clock.advance(DOUBT_SECONDS / 2)
    assert leader.give("other", 9) == [4, 5], "there is something else to do"
    assert leader.give("other", 9, holding=[4, 5]) == [0], "it has its share"
    leader.committed = {4, 5}
    assert leader.give("other", 9, holding=[0]) == [1]
    assert leader.give("other", 9, holding=[0, 1]) == []


def test_with_diloco_what_one_trainer_was_granted_no_other_gets() -> None:
    """No peer waits for a granted microbatch, so nobody else has to run it, however long it takes."""
    leader = Leader(DILOCO)
    given = leader.give("a", 2)
    leader.clock.advance(3600.0)
    assert len(given) == 2
    assert not {*given} & {*leader.give("b", 9)}


def test_trainers_that_have_room_share_a_round() -> None:
    """If the first trainer that asks got all microbatches, the other one would have nothing to do, and all would be
    lost if the first one died."""
    config = RunConfig(rounds=RoundsConfig(setting="synchronous", round_samples=256))
    leader = Leader(config)
    assert leader.give("a", 99, committed=set(range(config.microbatches_per_round))) == []
    held: dict[str, list[int]] = {"b": [], "a": []}
    for trainer in [*held] * 10:
        held[trainer] += leader.give(trainer, 99, holding=held[trainer])
    assert sorted(held["a"] + held["b"]) == [*range(config.microbatches_per_round)]
    assert {name: len(microbatches) for name, microbatches in held.items()} == {"b": 16, "a": 16}


@pytest.mark.parametrize("config", [SYNCHRONOUS, DILOCO])
def test_nobody_can_release_anothers_lease(config: RunConfig) -> None:
    leader = Leader(config)
    leader.give("a", 2)
    leader.ask("b", 0, released=[0, 1])
    assert not set(leader.give("b", 2)) & {0, 1}


def test_a_grant_that_did_not_arrive_is_made_again_as_new() -> None:
    """If it were granted again as a replay for stage 0, all other stages would still lack its gradient, and each would
    need a replay of its own."""
    leader = Leader(SYNCHRONOUS)
    assert leader.give("a", 3) == [0, 1, 2]
    grant = leader.ask("a", 9, acknowledged=[1])
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([0, 2, 3, 4, 5], None)
    assert leader.give("a", 9, holding=[0, 2]) == [3, 4, 5]
    assert leader.give("a", 9, holding=[3, 4, 5]) == [], "it is done with those that it has held"


# -- synchronous: a new leader -----------------------------------------------------------------------------------------


def test_a_new_leader_has_replayed_here_only_what_died_with_the_one_before() -> None:
    leader = Leader(SYNCHRONOUS)
    leader.committed, leader.lost, leader.counted = {0}, {2, 3}, {1}
    grant = leader.ask("a", 9)
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([2, 3], 0)
    grant = leader.ask("a", 9, holding=[2, 3])
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([4, 5], None), "of 1 nobody has told yet"


def test_a_new_leader_leaves_what_is_committed_or_still_held() -> None:
    leader = Leader(SYNCHRONOUS, led_seconds=0.0)
    leader.committed = {0, 1}
    leader.ask("a", 0, holding=[2, 3])
    leader.clock.advance(GATHER_SECONDS)
    assert leader.give("b", 9) == [4, 5]


def test_who_has_just_taken_the_lead_learns_first_who_holds_what() -> None:
    leader = Leader(SYNCHRONOUS, led_seconds=0.0)
    leader.lost = {5}
    assert leader.give("a", 9) == []
    assert leader.give("b", 9, holding=[2, 3]) == []
    leader.clock.advance(GATHER_SECONDS)
    assert leader.give("a", 9) == [5]
    assert leader.give("a", 9, holding=[5]) == [0, 1], "half of the round is with each of them"


def test_who_was_away_and_leads_again_learns_it_anew() -> None:
    """Meanwhile another peer may have led, and may have granted microbatches that this one has not granted."""
    leader = Leader(SYNCHRONOUS)
    assert leader.give("a", 1) == [0]
    leader.is_asked = False
    leader.clock.advance(GATHER_SECONDS)
    leader.is_asked = True
    assert leader.give("a", 9, holding=[0]) == []
    assert leader.give("b", 9, holding=[1, 2]) == []
    leader.clock.advance(GATHER_SECONDS)
    assert leader.give("a", 9, holding=[0]) == [3, 4]


def test_it_waits_for_a_peer_that_has_not_told_what_it_has_but_not_for_ever() -> None:
    leader = Leader(SYNCHRONOUS)
    assert leader.give("a", 9, awaits_reports=True) == []
    leader.clock.advance(LONGEST_GATHER_SECONDS)
    assert leader.give("a", 9, awaits_reports=True) == [*range(SIZE)]


# -- DiLoCo: an endless sequence ---------------------------------------------------------------------------------------


def test_a_new_leader_skips_what_its_predecessor_may_have_granted() -> None:
    leader = Leader(DILOCO)
    leader.highest = 40
    first, second = leader.give("a", 2, holding=[47])
    assert 47 + LEAST_SKIP < first < 48 + MOST_SKIP
    assert second == first + 1


def test_what_a_trainer_gives_back_was_granted_by_a_predecessor() -> None:
    leader = Leader(DILOCO)
    assert leader.give("a", 1, released=[3, 47])[0] > 47 + LEAST_SKIP


def test_who_knows_of_nothing_that_was_granted_hears_its_stage_s_peers_first() -> None:
    leader = Leader(DILOCO, led_seconds=0.0)
    assert leader.give("a", 2, awaits_reports=True) == []
    leader.highest = 40
    assert leader.give("a", 1)[0] > 40 + LEAST_SKIP
    alone = Leader(DILOCO, led_seconds=0.0)
    assert alone.give("a", 2) == [0, 1]
    silent = Leader(DILOCO, led_seconds=0.0)
    for _ in range(int(2 * LONGEST_GATHER_SECONDS)):
        assert silent.give("a", 2, awaits_reports=True) == []
        silent.clock.advance(0.5)
    assert silent.give("a", 2, awaits_reports=True) == [0, 1], "they may never tell"


def test_a_leader_that_has_only_downloaded_the_state_does_not_begin_at_0_again() -> None:
    for highest in (-1, 0):
        leader = Leader(DILOCO)
        leader.round, leader.highest = 50, highest
        assert leader.give("a", 1)[0] > MOST_SKIP, "of 2^47; all that was trained on would count twice"


def test_a_leader_that_was_away_does_not_come_to_what_another_has_granted_meanwhile() -> None:
    leader = Leader(DILOCO)
    assert leader.give("a", 5) == [*range(5)]
    leader.highest = 1_000_000
    first = leader.give("a", 1)[0]
    assert first > 1_000_000 + LEAST_SKIP
    assert leader.give("a", 2) == [first + 1, first + 2]


@pytest.mark.parametrize("by", ["a report", "a trainer"])
def test_an_id_that_somebody_made_up_does_not_use_up_the_others(by: str) -> None:
    leader = Leader(DILOCO)
    if by == "a report":
        leader.highest = LARGEST_COUNT
    granted = leader.give("a", 9, holding=[LARGEST_COUNT] if by == "a trainer" else [])
    assert len(granted) == 9
    assert 0 <= granted[0] < granted[-1] < LARGEST_COUNT // 2 + 9
    assert leader.give("a", 1) == [granted[-1] + 1]


def test_two_peers_that_take_over_at_once_grant_different_ones() -> None:
    """The two peers may not know of each other."""
    leaders = [Leader(DILOCO, seed=seed) for seed in range(2)]
    for leader in leaders:
        leader.highest = 40
    granted = [set(leader.give("a", 10_000)) for leader in leaders]
    assert not granted[0] & granted[1]


def test_with_diloco_nothing_is_granted_twice() -> None:
    """A microbatch whose lease ends here may have been renewed at another leader, or have been counted already."""
    leader = Leader(DILOCO)
    assert leader.give("a", 2) == [0, 1]
    leader.ask("a", 0, holding=[0], released=[1])
    leader.clock.advance(LEASE_SECONDS)
    assert leader.give("b", 2) == [2, 3]


# -- whatever happens --------------------------------------------------------------------------------------------------


class _Table(RuleBasedStateMachine):
    """Two trainers die, come back and commit in any order. No microbatch ever has live leases of both."""

    def __init__(self, config: RunConfig, lease_seconds: float) -> None:
        super().__init__()
        self.lease_seconds = lease_seconds
        self.leader = Leader(config)
        self.held: dict[str, dict[int, float]] = {"a": {}, "b": {}}

    @rule(trainer=st.sampled_from("ab"), count=st.integers(0, 3), finished=st.integers(0, 3), committed=st.booleans())
    def acquire(self, trainer: str, count: int, finished: int, committed: bool) -> None:
        now = self.leader.clock.monotonic()
        # A trainer gives up microbatches that it could not renew in time.
        held = {m: until for m, until in self.held[trainer].items() if until > now}
        done = sorted(held)[:finished]
        holding = sorted(held)[finished:]
        self.leader.committed |= set(done) if committed else set()
        granted = self.leader.give(trainer, count, holding=holding)
        assert not set(granted) & self.leader.committed
        self.held[trainer] = dict.fromkeys([*holding, *granted], now + self.lease_seconds)

    @rule(seconds=st.sampled_from([0.5, 2.0, LEASE_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.leader.clock.advance(seconds)

    @invariant()
    def no_live_lease_is_in_two_hands(self) -> None:
        now = self.leader.clock.monotonic()
        live = [{m for m, until in held.items() if until > now} for held in self.held.values()]
        assert not live[0] & live[1]


class _SynchronousTable(_Table):
    def __init__(self) -> None:
        super().__init__(SYNCHRONOUS, DOUBT_SECONDS)


class _DilocoTable(_Table):
    def __init__(self) -> None:
        super().__init__(DILOCO, LEASE_SECONDS)


_SynchronousTable.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
_DilocoTable.TestCase.settings = _SynchronousTable.TestCase.settings
TestSynchronousTable = _SynchronousTable.TestCase
TestDilocoTable = _DilocoTable.TestCase
