"""A member that has fallen silent may come back with all its microbatches, or it may be gone."""

from typing import Any

import pytest

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.timing import Timing
from swarm.averaging.averager import place_of
from swarm.averaging.roster import Roster, leader_of
from swarm.averaging.wire.context import MOST_UNLISTED
from swarm.averaging.wire.transport import contact_of
from swarm.errors import MalformedMessage
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId, PeerRecord, PeerState
from tests.averaging.doubles import make_context, record
from tests.averaging.fake_stage import make_config
from tests.support.manual_clock import ManualClock

TIMING = Timing()
OTHER = PeerId(record(2).peer_id)
HERE = Standing(run_samples=0, round=0, lineage="00")


class Group:
    """This peer's roster, which has heard of two microbatches at another member."""

    def __init__(self, setting: str = "synchronous", *, own: int = 1, round_microbatches: int = 100) -> None:
        self.clock = ManualClock()
        self.listed = [record(2)]
        self.config = config = make_config(setting, microbatches=round_microbatches)
        context = make_context(record(own), lambda stage: self.listed, config=config, timing=TIMING, clock=self.clock)
        self.place = place_of(context, HERE)
        self.roster = Roster(context, self.place)
        self.report(3, 4)

    def report(self, *committed: int, by: PeerRecord | None = None, **other: Any) -> bool:
        fields: dict[str, Any] = {
            "standing": messages.pack_standing(HERE),
            "committed_gaps": messages.pack_indices(committed),
        }
        return self.roster.hear(pb.ReportRequest(sender=contact_of(by or record(2)), **(fields | other)))

    @property
    def committed(self) -> set[int]:
        return {index for report in self.roster.members().values() for index in report.progress.committed}

    @property
    def lost(self) -> set[int]:
        return set(self.roster.reports.lost)


def test_a_newcomer_waits_for_those_that_only_answered_it() -> None:
    """Those peers do not know of the newcomer yet, and would be left out if it led a round at once."""
    group, third = Group(), PeerId(record(3).peer_id)
    assert not group.roster.awaits_members()
    group.roster.answered(third, HERE)
    assert group.roster.awaits_members()
    group.report(5, by=record(3))
    assert not group.roster.awaits_members()
    group.roster.answered(PeerId(record(4).peer_id), HERE)
    group.roster.suspect(PeerId(record(4).peer_id))
    assert not group.roster.awaits_members()
    group.roster.answered(PeerId(record(5).peer_id), HERE)
    group.clock.advance(TIMING.fresh_seconds)
    assert not group.roster.awaits_members(), "the round is not young any more"


def test_a_member_that_leaves_is_called_until_it_is_gone() -> None:
    """Once the member is gone, its microbatches are lost, and the others know that."""
    group = Group()
    group.listed = [record(2).model_copy(update={"state": PeerState.LEAVING})]
    group.clock.advance(TIMING.fresh_seconds)
    assert not group.roster.strangers(), "it may have taken itself for the leader until now"
    group.clock.advance(0.1)
    assert group.roster.strangers() == [OTHER]
    group.roster.suspect(OTHER, is_gone=True)
    assert group.lost == {3, 4}
    assert not group.roster.strangers()


def test_one_that_does_not_answer_may_come_back_and_one_where_nobody_listens_does_not() -> None:
    group = Group()
    group.roster.suspect(OTHER, is_gone=False)
    assert (group.committed, group.lost) == (set(), set())
    assert not group.roster.awaits_reports()
    group.roster.suspect(OTHER, is_gone=True)
    assert (group.committed, group.lost) == (set(), {3, 4})
    group.report(3, 4)
    assert (group.committed, group.lost) == ({3, 4}, set()), "it was there all the same"


def test_a_member_that_fell_silent_is_missed_for_a_while() -> None:
    group = Group()
    assert not group.roster.misses_member()
    group.clock.advance(2 * TIMING.heartbeat_seconds + 0.1)
    assert group.roster.misses_member()
    group.roster.suspect(OTHER, is_gone=False)
    assert group.roster.misses_member()
    group.clock.advance(TIMING.missed_seconds)
    assert not group.roster.misses_member(), "it will not be back soon"
    group.report(3, 4)
    group.clock.advance(TIMING.fresh_seconds)
    group.roster.suspect(OTHER, is_gone=True)
    assert not group.roster.misses_member()


def test_a_peer_that_has_not_told_what_it_has_may_have_some() -> None:
    group = Group("diloco")
    group.roster.moved()
    group.roster.forget()
    assert group.roster.absent_samples(()) == 1
    group.report(num_samples=0)
    assert group.roster.absent_samples(()) == 0


def test_who_is_left_out_or_elsewhere_is_not_waited_for() -> None:
    group = Group()
    group.roster.suspicions.exclude(OTHER)
    assert not group.roster.awaits_reports(), "it has told"
    group = Group()
    group.roster.forget()
    group.roster.answered(OTHER, Standing(run_samples=0, round=0, lineage="another"))
    assert not group.roster.awaits_reports()


def test_what_one_gave_up_and_another_has_is_not_lost_though_the_other_falls_silent() -> None:
    group = Group()
    third = record(3)
    group.report(3, 4, by=third)
    group.report(3)
    group.roster.suspect(PeerId(third.peer_id), is_gone=False)
    assert (group.committed, group.lost) == ({3}, set())
    group.roster.suspect(PeerId(third.peer_id), is_gone=True)
    assert (group.committed, group.lost) == ({3}, {4})


def test_after_a_freeze_of_this_peer_nothing_of_the_others_is_lost() -> None:
    group = Group()
    group.roster.forget()
    assert (group.committed, group.lost) == (set(), set())
    assert group.roster.awaits_reports()


def test_whoever_leads_next_knows_what_the_leader_and_all_had() -> None:
    group = Group()
    assert group.roster.reports.counted == {3, 4}
    leader = PeerId(record(3).peer_id)
    gaps = messages.pack_indices
    group.roster.heard_of_round(leader, HERE, pb.ReportReply(committed_gaps=gaps([5]), counted_gaps=gaps([3, 4, 5, 6])))
    assert (group.roster.reports.counted, group.lost) == (frozenset([3, 4, 5, 6]), set())
    group.roster.suspect(leader, is_gone=True)
    assert (group.roster.reports.counted, group.lost) == (frozenset([3, 4, 5, 6]), {5})


def test_a_leader_that_answers_leads_though_its_announcements_lapse() -> None:
    """Otherwise another peer would lead until this one made itself known, and again some time after that."""
    group = Group(own=3)
    group.listed.clear()
    for _ in range(20):
        assert group.roster.leader() == OTHER
        assert not group.roster.is_silent(OTHER)
        group.clock.advance(TIMING.heartbeat_seconds)
        group.roster.answered(OTHER, HERE)
    group.clock.advance(TIMING.fresh_seconds + 0.1)
    assert group.roster.leader() == record(3).peer_id


def test_a_member_that_names_ever_more_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.averaging.agreement.reports.LONGEST_LIST", 10)
    group = Group()
    for first in range(0, 100, 5):
        group.report(*range(first, first + 5))
    assert len(group.roster.reports.counted) <= 10
    assert len(group.lost) <= 10


def test_made_up_peers_do_not_fill_the_memory() -> None:
    group = Group()
    for number in range(10, 500):
        group.clock.advance(0.001)
        group.report(5, by=record(number))
        # A call to a peer that was forgotten meanwhile may still fail, or be answered.
        group.roster.suspect(PeerId(record(max(10, number - 100)).peer_id))
        group.roster.answered(PeerId(record(max(10, number - 200)).peer_id), HERE)
    newest = {PeerId(record(number).peer_id) for number in range(500 - MOST_UNLISTED, 500)}
    assert group.roster.members().keys() == newest | {OTHER}, "who is listed is not forgotten, however long silent"
    assert group.roster.num_remembered <= MOST_UNLISTED + 3


def test_a_newcomer_that_reports_is_not_forgotten_for_those_that_were_heard_of_before_it() -> None:
    """The newcomer's record has not spread yet."""
    group = Group()
    newcomer = record(3)
    for number in range(10, 500):
        group.clock.advance(0.001)
        if number % (MOST_UNLISTED // 2) == 0:
            group.report(6, by=newcomer)
        group.report(5, by=record(number))
        assert number < MOST_UNLISTED or PeerId(newcomer.peer_id) in group.roster.members()
    group.listed.append(newcomer)
    for number in range(500, 1000):
        group.report(5, by=record(number))
    assert {OTHER, newcomer.peer_id} <= group.roster.members().keys()


def test_members_that_were_listed_are_no_strangers_when_the_directory_is_out_of_reach() -> None:
    group = Group()
    mates = [record(number) for number in range(10, 10 + 2 * MOST_UNLISTED)]
    group.listed += mates
    for mate in mates:
        group.report(5, by=mate)
    group.roster.moved()
    group.listed.clear()
    for number in range(1000, 1100):
        group.clock.advance(0.001)
        group.report(5, by=record(number))
    assert {PeerId(mate.peer_id) for mate in mates} <= group.roster.members().keys()
    assert group.roster.num_remembered <= 3 * MOST_UNLISTED + 3


def test_what_is_named_of_another_round_is_left_out() -> None:
    group = Group(round_microbatches=10)
    before = 2 * group.config.rounds.round_samples
    elsewhere: dict[str, Any] = {"standing": pb.Standing(round=2, run_samples=before, lineage="02")}
    group.report(3, 9, 10, 1 << 40)
    assert group.committed == {3, 9}
    group.report(3, 19, 20, 29, 30, **elsewhere)
    group.place.installed(messages.unpack_standing(elsewhere["standing"]), [], [])
    (report,) = group.roster.members().values()
    assert report.progress.committed == {20, 29}


@pytest.mark.parametrize(
    "fields",
    [{"standing": pb.Standing(lineage="0" * 65)}, {"prepared": pb.Ballot(attempt=1, leader_id="0" * 65)}],
    ids=["lineage", "leader"],
)
def test_long_texts_are_not_kept(fields: dict[str, Any]) -> None:
    group = Group()
    with pytest.raises(MalformedMessage, match="has 65 characters, at most 64 are taken"):
        group.report(by=record(3), **fields)
    assert group.roster.contacts.record(PeerId(record(3).peer_id)) is None


def test_the_lowest_id_leads() -> None:
    assert leader_of(["b", "a", "c"]) == "a"
