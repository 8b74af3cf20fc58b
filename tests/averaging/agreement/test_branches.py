"""Which peers are believed to be ahead. What counts is how many hold the same state, and not the round that they
claim."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from swarm.averaging.agreement.branches import MOST_DOUBTS, Branches, Voice, most_held
from swarm.averaging.agreement.messages import PAST, Standing
from swarm.types import Block, PeerId, PeerRecord
from tests.averaging.doubles import QUICK, make_context, record
from tests.averaging.fake_stage import make_config
from tests.support.manual_clock import ManualClock

ROUND_SAMPLES, ROUND_SECONDS = 10, 2.0
PATIENCE_SECONDS = 3.0
LIAR = 1000


def at(round_number: int, branch: str = "", *, samples: int | None = None) -> Standing:
    """Where a branch is at a round. All other branches parted from the empty one."""
    run_samples = ROUND_SAMPLES * round_number if samples is None else samples
    return Standing(run_samples=run_samples, round=round_number, lineage=f"{branch}{round_number}")


def voice(standing: Standing, *, since: int | None = None) -> Voice:
    """The answer of a holder at this place. Its branch parted from the common one after round `since`."""
    branch = standing.lineage.removesuffix(str(standing.round))
    rounds = range(max(0, standing.round - PAST), standing.round)
    return Voice(
        standing=standing, past=tuple(at(n, branch if since is None or n > since else "").lineage for n in rounds)
    )


class SleepingClock(ManualClock):
    """The clock of a machine that slept for a while."""

    slept_seconds = 0.0

    def time(self) -> float:
        return super().time() + self.slept_seconds


class Peer:
    """This peer, after it has committed some rounds with others."""

    def __init__(self, num_rounds: int, *, more_samples_win: bool = True) -> None:
        self.clock = SleepingClock()
        self.run_round: int | None = None
        config = make_config(stages=2, quorum="available" if more_samples_win else "majority")
        timing = dataclasses.replace(QUICK, fresh_seconds=PATIENCE_SECONDS)
        context = make_context(record(1), self.other_peers, config=config, timing=timing, clock=self.clock)
        self.branches = Branches(at(0), config, self.clock, timing, lambda: context.other_blocks)
        for number in range(1, num_rounds + 1):
            self.commit(at(number))

    def other_peers(self, block: Block) -> list[PeerRecord]:
        if self.run_round is None:
            return []
        return [record(number, block.stage).model_copy(update={"round": self.run_round}) for number in (7, 8)]

    def commit(self, after: Standing) -> None:
        self.clock.advance(ROUND_SECONDS)
        self.branches.committed(after)

    def hear(self, announced: Mapping[str, Standing] | None = None, /, **voices: Voice) -> Standing | None:
        """Let all holders answer, and return the place to which this peer should go.

        Args:
            announced: the places that holders which do not answer had announced.
        """
        self.branches.listen()
        for name, told in voices.items():
            self.branches.heard(PeerId(name), told)
        signed = {PeerId(name): standing for name, standing in (announced or {}).items()}
        return self.branches.choose(is_sound=True, announced=signed)


# -- what a liar comes to ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("since", [None, 5], ids=["of nowhere", "of this peer's own branch"])
@pytest.mark.parametrize("more_samples_win", [True, False])
def test_one_that_is_far_ahead_is_not_followed_by_two(since: int | None, *, more_samples_win: bool) -> None:
    peer = Peer(5, more_samples_win=more_samples_win)
    lie = voice(at(LIAR, "x"), since=since)
    assert peer.hear(b=voice(at(5)), liar=lie) is None
    assert peer.hear(b=voice(at(6)), liar=lie) == at(6)


@pytest.mark.parametrize("round_number", [5, 6, LIAR])
def test_nor_one_that_names_our_own_lineage_and_more_samples(round_number: int) -> None:
    peer = Peer(5)
    standing = Standing(run_samples=10**6, round=round_number, lineage=at(5).lineage)
    assert not peer.branches.is_known(standing)
    assert peer.hear(b=voice(at(5)), c=voice(at(5)), liar=Voice(standing=standing)) is None


def test_who_was_away_follows_the_two_and_not_the_one_beyond_them() -> None:
    peer = Peer(5)
    lie = Voice(standing=at(LIAR, "x"), past=(*voice(at(9)).past[1:], at(9).lineage))
    assert peer.hear(a=voice(at(9)), b=voice(at(9)), liar=lie) == at(9)
    assert peer.branches.behind(at(9)) == {"a", "b"}


def test_one_alone_is_not_followed_farther_than_the_run_can_have_come() -> None:
    peer = Peer(5)
    peer.clock.advance(100 * ROUND_SECONDS)
    assert peer.hear(a=voice(at(100))) == at(100)
    assert peer.hear(a=voice(at(LIAR))) is None
    assert peer.hear(a=voice(at(LIAR, samples=60))) is None, "too many rounds"
    assert peer.hear(a=voice(at(60, samples=10**5))) is None, "too many samples"


def test_while_somebody_is_about_to_come_one_alone_is_not_followed() -> None:
    """The peer that is about to join is on this peer's branch, and does not know of the commit yet."""
    peer = Peer(5)
    lie = voice(at(7, "x"), since=3)
    assert peer.hear(b=voice(at(4)), liar=lie) is None
    assert peer.hear(liar=lie) == at(7, "x")


def test_what_was_had_from_others_is_not_left_for_as_many_others() -> None:
    """Some of the peers that gave the state may be out of reach for a moment."""
    peer = Peer(5)
    peer.branches.installed(at(9), [at(8).lineage])
    lie = voice(at(10, "x"), since=8)
    assert peer.hear(b=voice(at(9)), liar=lie) is None
    peer.clock.advance(100 * ROUND_SECONDS)
    assert peer.hear(liar=voice(at(LIAR, "x"))) is None, "too far"
    assert peer.hear(b=voice(at(9)), liar=lie, other=lie) == lie.standing


def test_newcomers_are_no_reason_to_begin_anew() -> None:
    peer = Peer(0)
    peer.branches.installed(at(50), [at(49).lineage])
    assert peer.hear({}, **{name: Voice(standing=at(0)) for name in "abc"}) is None


# -- what honest peers come to -----------------------------------------------------------------------------------------


def test_a_newcomer_follows_the_only_holder() -> None:
    assert Peer(0).hear(a=voice(at(LIAR))) == at(LIAR)


def test_a_newcomer_follows_what_most_hold() -> None:
    newcomer = Peer(0)
    assert newcomer.hear(liar=voice(at(LIAR, "x")), a=voice(at(7)), b=voice(at(8))) == at(7)
    assert newcomer.branches.behind(at(7)) == {"a", "b"}


def test_who_was_away_from_a_run_of_two_follows_the_other() -> None:
    peer = Peer(5)
    peer.clock.advance(500 * ROUND_SECONDS)
    assert peer.hear(a=voice(at(505))) == at(505)


def test_a_clock_that_stood_still_while_the_machine_slept_does_not_matter() -> None:
    peer = Peer(5)
    peer.clock.slept_seconds += 500 * ROUND_SECONDS
    assert peer.hear(a=voice(at(505))) == at(505)


def test_the_part_with_more_holders_wins_and_of_equal_ones_that_with_more_samples() -> None:
    ours, few, many = voice(at(7, "a"), since=5), voice(at(6, "b"), since=5), voice(at(9, "b"), since=5)

    def of_branch(number: int) -> Peer:
        peer = Peer(5)
        for later in range(6, number + 1):
            peer.commit(at(later, "a"))
        return peer

    assert of_branch(7).hear(a=ours, b=many) is None, "two to one"
    assert of_branch(7).hear(b=few, c=few) == few.standing, "one to two"
    assert of_branch(7).hear(b=few) is None, "one to one, with fewer samples"
    assert of_branch(7).hear(b=many) == many.standing, "one to one, with more"


def test_with_a_majority_wanted_only_one_that_is_rounds_ahead_is_followed() -> None:
    peer = Peer(5, more_samples_win=False)
    assert peer.hear(b=voice(at(5, "b")), c=voice(at(5, "b"))) is None
    assert peer.hear(b=voice(at(6, "b")), c=voice(at(6, "b"))) == at(6, "b")


def test_of_three_parts_two_come_together_and_then_the_third() -> None:
    """A peer at the place where all branches begin decides first. The others wait for its decision."""
    b, c = voice(at(7, "b"), since=5), voice(at(8, "c"), since=5)
    behind, other = Peer(5), Peer(5)
    for number in (6, 7):
        other.commit(at(number, "b"))
    assert other.hear(a=voice(at(5)), c=c) is None
    assert behind.hear(b=b, c=c) == c.standing
    assert other.hear(a=c, c=c) == c.standing


def test_the_dead_have_signed_where_they_were() -> None:
    """Two peers committed rounds together with a third one, and then died. The third one is still there. Two others
    were away meanwhile."""
    peer, left = Peer(5), voice(at(7))
    assert peer.hear(other=voice(at(5)), left=left) is None
    assert peer.hear({"dead": at(7), "too": at(7)}, other=voice(at(5)), left=left) == at(7)
    # They may have died before they announced their last round.
    assert peer.hear({"dead": at(6), "too": at(6)}, other=voice(at(5)), left=left) == at(6)
    assert "left" in peer.branches.behind(at(6))


def test_where_nobody_is_left_nobody_goes_and_for_staying_the_dead_do_not_count() -> None:
    peer = Peer(5)
    assert peer.hear({"dead": at(7), "too": at(7)}, other=voice(at(5))) is None
    assert peer.hear({"dead": at(5), "too": at(5)}, other=voice(at(6)), another=voice(at(6))) == at(6)
    assert peer.hear({"dead": at(6)}, other=voice(at(5)), liar=voice(at(LIAR, "x"))) is None


def test_where_the_other_stages_are_far_ahead_nobody_can_stay() -> None:
    """The other stages waited for this one at each round, so some of its holders went on."""
    peer, left = Peer(5), voice(at(8))
    for run_round in (None, 5, 6):
        peer.run_round = run_round
        assert peer.hear(other=voice(at(5)), left=left) is None
    peer.run_round = 8
    assert peer.hear(other=voice(at(5)), left=left) == left.standing
    assert peer.hear(other=voice(at(5)), liar=voice(at(LIAR))) is None


def test_a_state_that_is_not_sound_gives_way_to_any() -> None:
    peer = Peer(5)
    peer.branches.heard(PeerId("a"), voice(at(5)))
    assert peer.branches.choose(is_sound=True, announced={}) is None
    assert peer.branches.choose(is_sound=False, announced={}) == at(5)


# -- what is said of those that are not followed -----------------------------------------------------------------------


def test_one_elsewhere_is_named_once_when_it_stays_there() -> None:
    peer, said = Peer(5), list[str]()
    for _ in range(8):
        peer.hear(b=voice(at(5)), liar=voice(at(LIAR, "x")))
        said += peer.branches.stay()
        assert peer.branches.is_elsewhere(PeerId("liar"))
        assert peer.branches.is_in_doubt == (not said)
        peer.clock.advance(PATIENCE_SECONDS / 2)
    assert said == peer.branches.refusals
    assert len(said) == 1
    assert "liar says that it is at round 1000 of another branch, with 10000 samples (lineage x1000): " in said[0]
    assert "1 of 3 stand behind it" in said[0]
    assert said[0].endswith("this peer stays at round 5")


def test_one_that_comes_back_or_goes_is_not_shown_for_good() -> None:
    peer = Peer(5)
    for _ in range(3):
        peer.hear(x=voice(at(LIAR, "x")), y=voice(at(LIAR, "y")))
        peer.branches.stay()
        peer.clock.advance(PATIENCE_SECONDS)
    assert len(peer.branches.refusals) == 2
    peer.hear(x=voice(at(5)))
    assert [line.split()[0] for line in peer.branches.refusals] == ["y"]
    peer.clock.advance(100.0)
    assert not peer.branches.refusals


def test_made_up_holders_do_not_fill_the_memory() -> None:
    peer = Peer(5)
    for number in range(MOST_DOUBTS + 50):
        peer.hear({}, **{f"liar-{number}": voice(at(LIAR, "x"))})
        peer.branches.stay()
        peer.clock.advance(0.01)
    assert not peer.branches.is_elsewhere(PeerId("liar-0"))
    assert peer.branches.is_elsewhere(PeerId(f"liar-{MOST_DOUBTS + 49}"))


# -- offers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offers", "best"),
    [
        ({"a": at(7)}, "a"),
        ({"a": at(7), "b": at(8)}, "a"),
        ({"a": at(7), "b": at(8), "c": at(8)}, "b"),
        ({"a": at(7), "b": at(8), "liar": at(LIAR, "x")}, "a"),
        ({"a": at(8), "b": at(8), "liar": at(LIAR, "x")}, "a"),
    ],
)
def test_of_several_offers_the_farthest_is_taken_that_most_stand_behind(offers: dict[str, Any], best: str) -> None:
    names = {name.encode(): voice(standing) for name, standing in offers.items()}
    assert most_held(names, dict.fromkeys(names, 1))[0] == best.encode()
