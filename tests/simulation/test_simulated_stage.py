"""A stage's rounds on virtual time: what becomes of them when members die at the worst moments."""

import dataclasses
import random

import pytest

from swarm.averaging.exchanging.shares import Offer, divide
from swarm.averaging.leading.group import Phase
from swarm.simulation.simulated_exchange import exchange_seconds
from swarm.simulation.simulated_member import SimulatedMember
from swarm.simulation.simulated_participant import TIMING
from swarm.simulation.simulated_stage import SimulatedStage
from swarm.simulation.stage_rounds import Setting
from swarm.simulation.timeline import Timeline
from swarm.types import PeerId

CALM = Setting(
    num_members=5,
    quorum="available",
    lifetime_seconds=float("inf"),
    round_seconds=60.0,
    payload_bytes=32_000_000,
    bytes_per_second=12.5e6,
)


def build(**changes: object) -> SimulatedStage:
    return SimulatedStage(Timeline(), random.Random(1), dataclasses.replace(CALM, **changes))  # type: ignore[arg-type]


def run_until(stage: SimulatedStage, phase: Phase, num_members: int = 1) -> None:
    while sum(member.group.phase is phase for member in stage.members.values()) < num_members:
        stage.timeline.run(stage.timeline.monotonic() + 0.01)
        assert stage.timeline.monotonic() < 1000.0


def leader(stage: SimulatedStage) -> SimulatedMember:
    return stage.members[min(stage.members)]


def standings(stage: SimulatedStage) -> set[int]:
    return {member.standing.round for member in stage.members.values()}


def test_a_calm_stage_commits_every_round_at_the_first_attempt_with_everybody() -> None:
    stage = build()
    stage.timeline.run(300.0)
    assert len(stage.rounds.ends) == 4
    assert all(end.num_attempts == 1 and end.took_part == 1.0 for end in stage.rounds.ends)
    assert standings(stage) == {4}
    assert len({member.standing for member in stage.members.values()}) == 1


def test_a_death_during_the_exchange_is_aborted_and_the_next_ballot_goes_without_that_member() -> None:
    stage = build()
    run_until(stage, Phase.EXCHANGING, 5)
    victim = stage.members[max(stage.members)]
    ballot = leader(stage).leads
    stage.kill(victim)
    died_at = stage.timeline.monotonic()
    run_until(stage, Phase.IDLE, 4)
    noticed = stage.timeline.monotonic() - died_at
    assert TIMING.fresh_seconds - TIMING.heartbeat_seconds < noticed < 2 * TIMING.fresh_seconds
    run_until(stage, Phase.BEGUN)
    (active,) = {member.group.active for member in stage.members.values()} - {None}
    assert active is not None
    assert ballot is not None
    assert active > ballot
    while not stage.rounds.ends:
        stage.timeline.run(stage.timeline.monotonic() + 1.0)
    assert stage.rounds.ends[0].num_attempts >= 2
    assert victim.peer_id not in stage.rounds.newest_members


def test_a_leader_that_dies_is_followed_by_the_next_one() -> None:
    stage = build()
    run_until(stage, Phase.EXCHANGING, 5)
    first, second = sorted(stage.members)[:2]
    stage.kill(stage.members[first])
    while not stage.rounds.ends:
        stage.timeline.run(stage.timeline.monotonic() + 0.01)
    assert stage.members[second].standing.round == 1
    assert len(stage.rounds.newest_members) == 4
    assert stage.rounds.ends[0].num_attempts >= 2


def test_what_all_have_prepared_is_committed_though_its_leader_is_gone() -> None:
    stage = build()
    run_until(stage, Phase.PREPARED, 5)
    stage.kill(leader(stage))
    while not stage.rounds.ends:
        stage.timeline.run(stage.timeline.monotonic() + 0.01)
    assert len(stage.rounds.newest_members) == 5, "the result of the dead leader's attempt, and not a new one"
    assert stage.rounds.ends[0].num_attempts == 2


def test_a_member_that_was_away_is_back_at_the_others_round() -> None:
    stage = build()
    victim = max(stage.members)
    stage.timeline.run(10.0)
    stage.kill(stage.members[victim])
    stage.timeline.run(600.0)
    assert victim in stage.members
    assert victim in stage.rounds.newest_members
    assert len(standings(stage)) == 1


@pytest.mark.parametrize(("quorum", "goes_on"), [("available", True), ("majority", False)])
def test_a_minority_goes_on_only_where_it_may(quorum: str, goes_on: bool) -> None:
    # With so much to download the dead are not back in time.
    stage = build(quorum=quorum, payload_bytes=400_000_000)
    while not stage.rounds.ends:
        stage.timeline.run(stage.timeline.monotonic() + 1.0)
    for peer_id in sorted(stage.members)[2:]:
        stage.kill(stage.members[peer_id])
    stage.timeline.run(stage.timeline.monotonic() + 200.0)
    assert (len(stage.rounds.newest_members) == 2) == goes_on
    assert goes_on or stage.rounds.ending_seconds > 0


@pytest.mark.parametrize("quorum", ["available", "majority"])
@pytest.mark.parametrize("payload_bytes", [1000, 32_000_000])
def test_rounds_go_on_and_members_agree_whoever_dies_when(quorum: str, payload_bytes: int) -> None:
    stage = build(num_members=8, quorum=quorum, lifetime_seconds=400.0, payload_bytes=payload_bytes)
    by_round: dict[int, set[str]] = {}
    for at in range(3000):
        stage.timeline.run(float(at))
        for member in stage.members.values():
            by_round.setdefault(member.standing.round, set()).add(member.standing.lineage)
    assert len(stage.rounds.ends) > 15
    assert any(end.num_attempts > 1 for end in stage.rounds.ends) or payload_bytes == 1000
    assert all(len(lineages) == 1 for lineages in by_round.values()), "one state a round"


def test_an_exchange_lasts_as_long_as_the_slowest_line_has_to_send() -> None:
    lines = {PeerId("a"): 10.0, PeerId("b"): 10.0, PeerId("c"): 2.0}
    offers = [Offer(peer_id=p, num_samples=1, round_samples=1, norm=1.0, bytes_per_second=b) for p, b in lines.items()]
    shares = divide(offers, num_elements=100, tile=1, clip_to_median=0.0)
    # The slow one owns nothing, sends all of its own once; each of the others half of its own, and half's sum twice.
    assert [share.num_elements for share in shares.members] == [50, 50, 0]
    assert exchange_seconds(shares, lines) == 50.0
