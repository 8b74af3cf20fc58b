"""Leases: every microbatch is with one trainer at a time, and none is forgotten or granted for nothing."""

import random
import statistics
from collections.abc import Collection, Set
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm.config import RoundsConfig, RunConfig
from swarm.pipeline.leases import (
    GATHER_SECONDS,
    LEASE_SECONDS,
    LEAST_SKIP,
    LONGEST_GATHER_SECONDS,
    LONGEST_QUIET_SECONDS,
    LOST_SECONDS,
    MOST_SKIP,
    SETTLE_SECONDS,
    SHOWN_SECONDS,
    Grant,
    LeaseTable,
    RoundView,
)
from swarm.pipeline.trainers import (
    BAN_SECONDS,
    DOUBT_SECONDS,
    FIRST_PATIENCE_SECONDS,
    KNOWN_SECONDS,
    LEAST_PATIENCE_SECONDS,
    Trainer,
    Trainers,
)
from swarm.types import LARGEST_COUNT
from tests.support.manual_clock import ManualClock

_SYNCHRONOUS = RunConfig(rounds=RoundsConfig(setting="synchronous", round_samples=48))
_DILOCO = RunConfig(rounds=RoundsConfig(setting="diloco", round_samples=48))
_SIZE = _SYNCHRONOUS.microbatches_per_round


class _AskedClock(ManualClock):
    """A clock during whose steps a trainer asks the leader all the time."""

    def __init__(self, leader: "_Leader") -> None:
        super().__init__()
        self._leader = leader

    def advance(self, seconds: float) -> None:
        while self._leader.is_asked and seconds > 0.5:
            super().advance(0.5)
            self._leader.ask("another", 0)
            seconds -= 0.5
        super().advance(seconds)


class _Leader:
    """A table with a clock, and with shorter calls for tests."""

    def __init__(self, config: RunConfig, stage: int = 0, seed: int = 0, led_seconds: float = GATHER_SECONDS) -> None:
        self.clock = _AskedClock(self)
        self.table = LeaseTable(config, stage, self.clock, random.Random(seed))
        self.committed: set[int] = set()
        self.counted: set[int] = set()
        self.lost: set[int] = set()
        self.highest = -1
        self.round = 0
        self.is_asked = config.rounds.synchronous
        """Whether a trainer that wants nothing asks all the time, as trainers do."""
        self.clock.advance(led_seconds)

    def ask(
        self, trainer: str | Trainer, count: int, *, holding: Collection[int] = (), released: Collection[int] = (),
        quiet_seconds: float = 0.0, committed: Set[int] | None = None, all_granted: bool = True,
        all_committed: bool = True, awaits_reports: bool = False, misses_member: bool = False,
        acknowledged: Collection[int] = (),
    ) -> Grant:  # fmt: skip
        view = RoundView(
            round=self.round, committed=self.committed if committed is None else committed,
            counted=self.counted | self.lost | self.committed, lost=self.lost, highest_microbatch=self.highest,
            quiet_seconds=quiet_seconds, awaits_reports=awaits_reports, misses_member=misses_member, complete=False,
        )  # fmt: skip
        return self.table.acquire(
            view, trainer if isinstance(trainer, Trainer) else Trainer(trainer, trainer), count, holding=holding,
            released=released, all_granted=all_granted,
            acknowledged=acknowledged, all_committed=all_committed,
        )  # fmt: skip

    def give(self, trainer: str | Trainer, count: int, **options: Any) -> list[int]:
        return list(self.ask(trainer, count, **options).microbatches)


def test_a_synchronous_round_is_handed_out_once() -> None:
    leader = _Leader(_SYNCHRONOUS)
    assert _SIZE == 6
    assert leader.give("a", 4) == [0, 1, 2, 3]
    assert leader.give("b", 4) == [4]
    assert leader.give("b", 4, holding=[4]) == [5]
    assert leader.give("b", 4, holding=[4, 5]) == []
    assert leader.give("a", 4, holding=[0, 1, 2, 3]) == []


def test_the_next_round_begins_where_the_last_one_ended() -> None:
    leader = _Leader(_SYNCHRONOUS)
    leader.give("a", _SIZE)
    leader.round = 1
    assert leader.give("a", 2, holding=[5]) == [6, 7]


def test_what_a_trainer_releases_goes_to_the_next() -> None:
    leader = _Leader(_SYNCHRONOUS)
    assert leader.give("a", 3) == [0, 1, 2]
    leader.ask("a", 0, holding=[0], released=[1, 2])
    assert leader.give("b", 2) == [1, 2]


def test_a_dead_trainers_leases_expire_and_a_living_ones_do_not() -> None:
    leader = _Leader(_SYNCHRONOUS)
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
    leader = _Leader(_SYNCHRONOUS)
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


def test_so_do_replays_that_it_holds() -> None:
    leader = _Leader(_SYNCHRONOUS, stage=1)
    leader.lost = {3, 4}
    assert leader.give("dead", 9, all_granted=False) == [3, 4]
    leader.clock.advance(DOUBT_SECONDS)
    grant = leader.ask("other", 9, all_granted=False)
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([3, 4], 1)


def test_with_diloco_nothing_is_kept_of_what_was_granted() -> None:
    """No peer waits for a granted microbatch, and no other trainer is granted it."""
    leader = _Leader(_DILOCO)
    leader.give("a", 2)
    leader.ask("b", 0, holding=range(1000))
    assert leader.table.num_leases == 0


def test_trainers_that_have_room_share_a_round() -> None:
    """If the first that asks got all, all would be lost with it, and the other would have nothing to do."""
    config = RunConfig(rounds=RoundsConfig(setting="synchronous", round_samples=256))
    leader = _Leader(config)
    assert leader.give("a", 99, committed=set(range(config.microbatches_per_round))) == []
    held: dict[str, list[int]] = {"b": [], "a": []}
    for trainer in [*held] * 10:
        held[trainer] += leader.give(trainer, 99, holding=held[trainer])
    assert sorted(held["a"] + held["b"]) == [*range(config.microbatches_per_round)]
    assert {name: len(microbatches) for name, microbatches in held.items()} == {"b": 16, "a": 16}


def test_a_trainer_alone_is_given_all_that_it_has_room_for() -> None:
    leader = _Leader(_SYNCHRONOUS)
    leader.give("a", 1)
    leader.clock.advance(DOUBT_SECONDS)
    assert leader.give("b", 9) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("config", [_SYNCHRONOUS, _DILOCO])
def test_nobody_can_release_anothers_lease(config: RunConfig) -> None:
    leader = _Leader(config)
    leader.give("a", 2)
    leader.ask("b", 0, released=[0, 1])
    assert not set(leader.give("b", 2)) & {0, 1}


def test_a_grant_that_did_not_arrive_is_made_again_as_new() -> None:
    """As a replay for stage 0 its gradient would be lacking at all other stages, which would be replayed one by one."""
    leader = _Leader(_SYNCHRONOUS)
    assert leader.give("a", 3) == [0, 1, 2]
    grant = leader.ask("a", 9, acknowledged=[1])
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([0, 2, 3, 4, 5], None)
    assert leader.give("a", 9, holding=[0, 2]) == [3, 4, 5]
    assert leader.give("a", 9, holding=[3, 4, 5]) == [], "it is done with those that it has held"


# -- synchronous: trainers that lie -----------------------------------------------------------------------------------


class _Race:
    """An honest trainer, and a bearer of another token that does what it can to keep rounds from ending."""

    def __init__(self, strategy: str, config: RunConfig, stage: int = 0) -> None:
        self.leader = _Leader(config, stage)
        self.leader.is_asked = False
        self.size = config.microbatches_per_round
        self.strategy = strategy
        self.num_names = 0
        self.lied_about: list[int] = []
        self.most_leases = 0

    def run_round(self) -> float:
        """Run a round to its end; returns its seconds. The honest trainer needs 0.25 s for two microbatches."""
        leader, began_at, quiet_seconds = self.leader, self.leader.clock.monotonic(), 0.0
        ids = range(leader.round * self.size, (leader.round + 1) * self.size)
        held: list[int] = []
        while not leader.committed >= set(ids):
            self._lie(ids, quiet_seconds)
            held += leader.give("honest", 2 - len(held), holding=held, quiet_seconds=quiet_seconds)
            self.most_leases = max(self.most_leases, leader.table.num_leases)
            leader.clock.advance(0.25)
            leader.committed |= set(held)
            quiet_seconds = 0.0 if held else quiet_seconds + 0.25
            held = []
            assert leader.clock.monotonic() - began_at < 3600, "it never ends"
        leader.round, leader.committed, self.lied_about = leader.round + 1, set(), []
        return leader.clock.monotonic() - began_at

    def _lie(self, ids: range, quiet_seconds: float) -> None:
        for _ in range(3):
            self.num_names += self.strategy != "holds its share"
            wanted = 99
            said: dict[str, Collection[int]] = {}
            match self.strategy:
                case "names all":
                    said = {"holding": ids}
                case "says it has run all":
                    said = {"acknowledged": ids}
                case "holds its share" | "holds its share under many names":
                    said = {"holding": self.lied_about}
                case "waits for the last":
                    said = {"holding": self.lied_about}
                    wanted = 99 if len(self.leader.committed) >= self.size - 4 else 0
                case "gives back and asks again":
                    said, self.lied_about = {"released": self.lied_about}, []
            liar = Trainer("liar", f"liar {self.num_names % 5}")
            self.lied_about += self.leader.give(liar, wanted, quiet_seconds=quiet_seconds, **said)


_STRATEGIES = [
    "names all", "says it has run all", "holds its share", "holds its share under many names", "waits for the last",
    "gives back and asks again", "forgets and asks again",
]  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_no_bearer_of_a_token_holds_up_a_run_for_good(strategy: str, stage: int) -> None:
    race = _Race(strategy, RunConfig(rounds=RoundsConfig(setting="synchronous", round_samples=256)), stage)
    first, *others = (race.run_round() for _ in range(12))
    assert first < FIRST_PATIENCE_SECONDS + 30.0
    assert statistics.mean(others) < LEAST_PATIENCE_SECONDS + 5.0
    assert race.most_leases <= race.size


def test_a_trainer_has_what_it_was_granted_whatever_it_names() -> None:
    leader = _Leader(_SYNCHRONOUS)
    assert leader.ask("liar", 0, holding=range(_SIZE)).microbatches == ()
    assert leader.table.num_leases == 0
    assert leader.give("honest", 2) == [0, 1]


def test_a_new_leader_believes_nobody_a_whole_round_and_the_modest_first() -> None:
    leader = _Leader(_SYNCHRONOUS, led_seconds=0.0)
    for number in range(20):
        leader.ask(Trainer("liar", f"liar {number}"), 0, holding=range(_SIZE))
    leader.ask("honest", 0, holding=[0, 1])
    leader.clock.advance(GATHER_SECONDS)
    assert leader.give("honest", 9, holding=[0, 1]) == [5], "2, 3 and 4 are the liar's"
    alone = _Leader(_SYNCHRONOUS, led_seconds=0.0)
    alone.ask("a", 0, holding=range(_SIZE))
    alone.clock.advance(GATHER_SECONDS)
    assert alone.give("b", 9) == [3, 4, 5]


def test_all_names_of_a_bearer_have_one_share() -> None:
    leader = _Leader(RunConfig(rounds=RoundsConfig(setting="synchronous", round_samples=256)))
    leader.give("honest", 1)
    granted = [leader.give(Trainer("liar", f"liar {number}"), 99) for number in range(50)]
    assert sum(map(len, granted)) <= 16
    assert len(leader.give("honest", 99, holding=[0])) > 0


def test_who_holds_what_others_then_run_has_nothing_for_a_while() -> None:
    leader = _Leader(_SYNCHRONOUS)
    held = leader.give("slow", 2)
    while mine := leader.give("b", 3):
        leader.committed |= set(mine)
    for _ in range(int(LEAST_PATIENCE_SECONDS / 0.5) + 1):
        leader.clock.advance(0.5)
        leader.ask("slow", 0, holding=held)
    assert leader.give("b", 9) == [0, 1]
    assert leader.give("slow", 1, holding=held) == []
    leader.committed |= {0, 1}
    leader.round = 1
    assert leader.give("slow", 9) == []
    assert leader.give("b", 2) == [6, 7]
    leader.is_asked = False
    for _ in range(int(BAN_SECONDS / 0.5)):
        leader.clock.advance(0.5)
        leader.ask("b", 0, holding=[6, 7])
    assert leader.give("slow", 1) == [8]


def test_a_banned_trainer_that_is_alone_goes_on() -> None:
    clock = ManualClock()
    trainers = Trainers(clock)
    alone = Trainer("a", "a")
    trainers.hear(alone)
    trainers.ban("a")
    assert not trainers.is_banned("a")
    trainers.hear(Trainer("b", "b"))
    assert trainers.is_banned("a")


# -- synchronous: what a stage has lost --------------------------------------------------------------------------------


def test_what_was_finished_but_is_counted_by_nobody_is_replayed_at_this_stage_only() -> None:
    leader = _Leader(_SYNCHRONOUS)
    leader.give("a", _SIZE)
    leader.committed = {0, 1, 2, 4}
    assert leader.give("a", 9, acknowledged=range(_SIZE)) == []
    leader.clock.advance(SETTLE_SECONDS)
    assert leader.give("a", 9, quiet_seconds=SETTLE_SECONDS / 2) == [], "acks may still be under way"
    grant = leader.ask("a", 9, quiet_seconds=SETTLE_SECONDS)
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([3, 5], 0)


def test_what_finished_just_now_is_not_missing_yet() -> None:
    leader = _Leader(_SYNCHRONOUS)
    leader.give("a", _SIZE)
    leader.clock.advance(LEASE_SECONDS - 1.0)
    leader.ask("a", 0, acknowledged=range(_SIZE))
    assert leader.give("a", 9, quiet_seconds=10.0) == []


def test_a_later_stage_grants_only_what_it_lacks() -> None:
    leader = _Leader(_SYNCHRONOUS, stage=1)
    leader.committed = {0, 1, 2, 3}
    assert leader.give("a", 9) == []
    grant = leader.ask("a", 1, quiet_seconds=SETTLE_SECONDS)
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([4], 1)
    assert leader.give("b", 9, quiet_seconds=SETTLE_SECONDS) == [5], "the other one is leased"


@pytest.mark.parametrize("all_granted", [False, True])
def test_a_later_stage_waits_for_what_stage_0_has_not_committed_yet(all_granted: bool) -> None:
    leader = _Leader(_SYNCHRONOUS, stage=1)
    leader.committed = {0, 1}
    assert leader.give("a", 9, quiet_seconds=60.0, all_granted=all_granted, all_committed=False) == []


@pytest.mark.parametrize("stage", [0, 1])
def test_what_died_with_its_member_is_replayed_while_the_round_goes_on(stage: int) -> None:
    leader = _Leader(_SYNCHRONOUS, stage=stage)
    leader.committed, leader.lost = {0}, {1, 2}
    grant = leader.ask("a", 9, all_granted=False)
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([1, 2], stage)
    leader.round, leader.committed, leader.lost = 1, set(), set()
    assert leader.ask("a", 9, all_granted=False).accumulate_only_at is None, "another round, in which nothing is lost"


def test_a_replay_is_left_to_the_trainer_that_ran_it_while_that_has_room() -> None:
    leader = _Leader(_SYNCHRONOUS, stage=1)
    leader.committed = {0, 1, 2, 3}
    leader.ask("a", 0, acknowledged=[0, 1])
    leader.ask("b", 0, acknowledged=[2, 3])
    leader.clock.advance(SHOWN_SECONDS)
    leader.committed, leader.lost = set(), {0, 1, 2, 3}
    assert leader.give("a", 1, all_granted=False) == [0]
    assert leader.give("b", 9, all_granted=False) == [2, 3], "one has wanted more just now"
    leader.clock.advance(KNOWN_SECONDS + 0.1)
    leader.ask("a", 0, holding=[0])
    assert leader.give("b", 9, holding=[2, 3], all_granted=False) == [1], "but now it has enough to do"


def test_who_may_not_replay_what_is_lost_gets_something_new() -> None:
    """The trainer that ran the lost microbatches is busy with one of them, and there is more to do."""
    leader = _Leader(_SYNCHRONOUS)
    leader.give("a", 2)
    leader.ask("a", 1, acknowledged=[0, 1])
    leader.clock.advance(SHOWN_SECONDS)
    leader.lost = {0, 1}
    assert leader.give("a", 1) == [0]
    grant = leader.ask("b", 2)
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([2, 3], None)


def test_what_a_later_stage_does_not_have_long_after_stage_0_is_replayed_while_the_round_goes_on() -> None:
    leader = _Leader(_SYNCHRONOUS, stage=2)
    leader.committed = {0}
    told = [0, 1, 3, _SIZE]
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


def test_the_same_at_stage_0_which_knows_itself_who_is_done_with_what() -> None:
    leader = _Leader(_SYNCHRONOUS)
    leader.give("a", 2)
    leader.ask("a", 0, holding=[0, 1])
    leader.ask("a", 0, holding=[1])
    leader.clock.advance(LOST_SECONDS)
    leader.ask("a", 0, holding=[1])
    grant = leader.ask("a", 9, holding=[1])
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([0], 0)


@pytest.mark.parametrize("reason", ["a peer has not told yet", "a member does not answer"])
def test_what_another_member_may_have_is_not_lost(reason: str) -> None:
    leader = _Leader(_SYNCHRONOUS, stage=1)
    if reason == "a member does not answer":
        leader.counted = {4}
    leader.give("a", 9, all_granted=False, acknowledged=[1])
    leader.clock.advance(2 * LOST_SECONDS)
    silent = reason == "a peer has not told yet"
    assert leader.give("a", 9, all_granted=False, awaits_reports=silent) == []
    leader.counted.clear()
    assert leader.give("a", 9, all_granted=False) == [1]


def test_a_replay_is_not_granted_again_while_its_ack_may_be_under_way() -> None:
    leader = _Leader(_SYNCHRONOUS, stage=1)
    leader.committed, leader.lost = {0}, {1}
    assert leader.give("a", 9) == [1]
    assert leader.give("a", 9) == []
    leader.clock.advance(SHOWN_SECONDS)
    assert leader.give("a", 9) == [1], "it came to nothing"


def test_what_may_come_back_is_replayed_once_there_is_nothing_new_to_do() -> None:
    leader = _Leader(_SYNCHRONOUS, stage=1)
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
    leader = _Leader(_SYNCHRONOUS)
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
    """The leader reaches that peer, but the peer does not reach the leader."""
    leader = _Leader(_SYNCHRONOUS, stage=1, led_seconds=LONGEST_GATHER_SECONDS)
    leader.committed = {0, 1, 2, 3, 4}
    assert leader.give("a", 9, awaits_reports=True, quiet_seconds=LONGEST_QUIET_SECONDS - 1) == []
    assert leader.give("a", 9, awaits_reports=True, quiet_seconds=LONGEST_QUIET_SECONDS) == [5]


def test_what_a_member_may_come_back_with_is_granted_all_the_same() -> None:
    leader = _Leader(_SYNCHRONOUS, stage=1)
    leader.committed, leader.counted = {2, 3, 4}, {0, 1}
    assert leader.give("a", 9, quiet_seconds=60.0) == [0, 1]
    assert leader.give("a", 9, holding=[0, 1], quiet_seconds=60.0) == [5], "nobody has shown it: it may have that too"
    leader = _Leader(_SYNCHRONOUS, stage=1)
    leader.committed = {0, 1, 2, 3, 4}
    assert leader.give("a", 9, quiet_seconds=60.0, misses_member=True) == [5], "a silent member has it, untold"


def test_a_replay_that_gets_lost_is_granted_again() -> None:
    leader = _Leader(_SYNCHRONOUS, stage=2)
    leader.committed = {0, 1, 2, 3, 4}
    assert leader.give("a", 9, quiet_seconds=9.0) == [5]
    assert leader.give("a", 9, quiet_seconds=9.0) == [], "its ack may still be under way"
    leader.clock.advance(SETTLE_SECONDS)
    assert leader.give("a", 9, quiet_seconds=9.0) == [5]


def test_a_complete_round_grants_nothing() -> None:
    leader = _Leader(_SYNCHRONOUS)
    leader.committed = set(range(_SIZE))
    grant = leader.ask("a", 9, quiet_seconds=100.0)
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([], None)


def test_a_new_leader_has_replayed_here_only_what_died_with_the_one_before() -> None:
    leader = _Leader(_SYNCHRONOUS)
    leader.committed, leader.lost, leader.counted = {0}, {2, 3}, {1}
    grant = leader.ask("a", 9)
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([2, 3], 0)
    grant = leader.ask("a", 9, holding=[2, 3])
    assert (list(grant.microbatches), grant.accumulate_only_at) == ([4, 5], None), "of 1 nobody has told yet"


def test_a_new_leader_leaves_what_is_committed_or_still_held() -> None:
    leader = _Leader(_SYNCHRONOUS, led_seconds=0.0)
    leader.committed = {0, 1}
    leader.ask("a", 0, holding=[2, 3])
    leader.clock.advance(GATHER_SECONDS)
    assert leader.give("b", 9) == [4, 5]


def test_who_has_just_taken_the_lead_learns_first_who_holds_what() -> None:
    leader = _Leader(_SYNCHRONOUS, led_seconds=0.0)
    leader.lost = {5}
    assert leader.give("a", 9) == []
    assert leader.give("b", 9, holding=[2, 3]) == []
    leader.clock.advance(GATHER_SECONDS)
    assert leader.give("a", 9) == [5]
    assert leader.give("a", 9, holding=[5]) == [0, 1], "half of the round is with each of them"


def test_how_late_is_what_was_done_before_it_led_counts_from_then() -> None:
    leader = _Leader(_SYNCHRONOUS, stage=1, led_seconds=GATHER_SECONDS / 2)
    leader.committed, leader.counted = {2, 3, 4, 5}, {0, 1}
    assert leader.give("a", 9, acknowledged=range(6)) == []
    leader.clock.advance(SHOWN_SECONDS - GATHER_SECONDS / 2)
    assert leader.give("a", 9, acknowledged=range(6)) == [0, 1]


def test_who_was_away_and_leads_again_learns_it_anew() -> None:
    """Meanwhile another peer may have led, and granted microbatches that this one has not."""
    leader = _Leader(_SYNCHRONOUS)
    assert leader.give("a", 1) == [0]
    leader.is_asked = False
    leader.clock.advance(GATHER_SECONDS)
    leader.is_asked = True
    assert leader.give("a", 9, holding=[0]) == []
    assert leader.give("b", 9, holding=[1, 2]) == []
    leader.clock.advance(GATHER_SECONDS)
    assert leader.give("a", 9, holding=[0]) == [3, 4]


def test_it_waits_for_a_peer_that_has_not_told_what_it_has_but_not_for_ever() -> None:
    leader = _Leader(_SYNCHRONOUS)
    assert leader.give("a", 9, awaits_reports=True) == []
    leader.clock.advance(LONGEST_GATHER_SECONDS)
    assert leader.give("a", 9, awaits_reports=True) == [*range(_SIZE)]


def test_what_a_silent_member_had_is_replayed_though_another_has_not_told_what_it_has() -> None:
    leader = _Leader(_SYNCHRONOUS, stage=1, led_seconds=LONGEST_GATHER_SECONDS)
    leader.committed, leader.counted = {2, 3, 4, 5}, {0}
    assert leader.give("a", 9, quiet_seconds=9.0, awaits_reports=True) == [0]
    assert leader.give("a", 9, quiet_seconds=9.0, awaits_reports=True, holding=[0]) == []


def test_while_a_peer_has_not_told_what_it_has_nothing_is_missing() -> None:
    leader = _Leader(_SYNCHRONOUS, stage=1, led_seconds=LONGEST_GATHER_SECONDS)
    assert leader.give("a", 9, quiet_seconds=9.0, awaits_reports=True) == []
    assert leader.give("a", 9, quiet_seconds=60.0) == [*range(_SIZE)]


# -- DiLoCo: an endless sequence ---------------------------------------------------------------------------------------


def test_diloco_counts_on_across_rounds() -> None:
    leader = _Leader(_DILOCO)
    assert leader.give("a", 5) == [0, 1, 2, 3, 4]
    leader.round = 7
    assert leader.give("b", 3) == [5, 6, 7]


def test_a_new_leader_skips_what_its_predecessor_may_have_granted() -> None:
    leader = _Leader(_DILOCO)
    leader.highest = 40
    first, second = leader.give("a", 2, holding=[47])
    assert 47 + LEAST_SKIP < first < 48 + MOST_SKIP
    assert second == first + 1


def test_what_a_trainer_gives_back_was_granted_by_a_predecessor() -> None:
    leader = _Leader(_DILOCO)
    assert leader.give("a", 1, released=[3, 47])[0] > 47 + LEAST_SKIP


def test_who_knows_of_nothing_that_was_granted_hears_its_stage_s_peers_first() -> None:
    leader = _Leader(_DILOCO, led_seconds=0.0)
    assert leader.give("a", 2, awaits_reports=True) == []
    leader.highest = 40
    assert leader.give("a", 1)[0] > 40 + LEAST_SKIP
    alone = _Leader(_DILOCO, led_seconds=0.0)
    assert alone.give("a", 2) == [0, 1]
    silent = _Leader(_DILOCO, led_seconds=0.0)
    for _ in range(int(2 * LONGEST_GATHER_SECONDS)):
        assert silent.give("a", 2, awaits_reports=True) == []
        silent.clock.advance(0.5)
    assert silent.give("a", 2, awaits_reports=True) == [0, 1], "they may never tell"


def test_a_leader_that_has_only_downloaded_the_state_does_not_begin_at_0_again() -> None:
    for highest in (-1, 0):
        leader = _Leader(_DILOCO)
        leader.round, leader.highest = 50, highest
        assert leader.give("a", 1)[0] > MOST_SKIP, "of 2^47; all that was trained on would count twice"


def test_a_leader_that_was_away_does_not_come_to_what_another_has_granted_meanwhile() -> None:
    leader = _Leader(_DILOCO)
    assert leader.give("a", 5) == [*range(5)]
    leader.highest = 1_000_000
    first = leader.give("a", 1)[0]
    assert first > 1_000_000 + LEAST_SKIP
    assert leader.give("a", 2) == [first + 1, first + 2]


@pytest.mark.parametrize("by", ["a report", "a trainer"])
def test_an_id_that_somebody_made_up_does_not_use_up_the_others(by: str) -> None:
    leader = _Leader(_DILOCO)
    if by == "a report":
        leader.highest = LARGEST_COUNT
    granted = leader.give("a", 9, holding=[LARGEST_COUNT] if by == "a trainer" else [])
    assert len(granted) == 9
    assert 0 <= granted[0] < granted[-1] < LARGEST_COUNT // 2 + 9
    assert leader.give("a", 1) == [granted[-1] + 1]


def test_two_peers_that_take_over_at_once_grant_different_ones() -> None:
    """Neither may hear of the other."""
    leaders = [_Leader(_DILOCO, seed=seed) for seed in range(2)]
    for leader in leaders:
        leader.highest = 40
    granted = [set(leader.give("a", 10_000)) for leader in leaders]
    assert not granted[0] & granted[1]


def test_with_diloco_nothing_is_granted_twice() -> None:
    """A microbatch whose lease ends here may have been renewed at another leader, or have been counted already."""
    leader = _Leader(_DILOCO)
    assert leader.give("a", 2) == [0, 1]
    leader.ask("a", 0, holding=[0], released=[1])
    leader.clock.advance(LEASE_SECONDS)
    assert leader.give("b", 2) == [2, 3]


# -- whatever happens --------------------------------------------------------------------------------------------------


class _Table(RuleBasedStateMachine):
    """Two trainers that die, come back and commit as they like: no live lease is ever in two hands."""

    def __init__(self, config: RunConfig, lease_seconds: float) -> None:
        super().__init__()
        self.lease_seconds = lease_seconds
        self.leader = _Leader(config)
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
        super().__init__(_SYNCHRONOUS, DOUBT_SECONDS)


class _DilocoTable(_Table):
    def __init__(self) -> None:
        super().__init__(_DILOCO, LEASE_SECONDS)


_SynchronousTable.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
_DilocoTable.TestCase.settings = _SynchronousTable.TestCase.settings
TestSynchronousTable = _SynchronousTable.TestCase
TestDilocoTable = _DilocoTable.TestCase
