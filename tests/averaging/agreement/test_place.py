import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.averaging.agreement.messages import Ballot, Refused, pack_ballot
from swarm.averaging.agreement.place import Group, Phase, unfinished
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId

OLD, MIDDLE, NEW = Ballot(1, "b"), Ballot(2, "a"), Ballot(2, "c")


def prepared_group(ballot: Ballot = MIDDLE) -> Group:
    group = Group(5)
    group.begin(5, ballot)
    group.join(5, ballot, "shares")
    group.prepare(5, ballot, "digest")
    return group


def test_a_round_from_begin_to_commit() -> None:
    group = Group(5)
    phases = [group.phase]
    group.begin(5, OLD)
    group.begin(5, OLD)
    phases.append(group.phase)
    group.join(5, OLD, "shares")
    phases.append(group.phase)
    group.prepare(5, OLD, "digest")
    phases.append(group.phase)
    assert phases == [Phase.IDLE, Phase.BEGUN, Phase.EXCHANGING, Phase.PREPARED]
    assert group.check_commit(5, "digest")
    group.commit(5, "digest")
    assert (group.round, group.phase, group.promised) == (6, Phase.IDLE, None)
    assert not group.check_commit(5, "digest"), "a commit that comes twice is no fault"


def test_lower_attempts_are_refused() -> None:
    group = prepared_group(MIDDLE)
    with pytest.raises(Refused):
        group.begin(5, OLD)
    with pytest.raises(Refused):
        group.abort(5, OLD, void=True)
    with pytest.raises(Refused):
        group.join(5, OLD, "shares")
    group.begin(5, NEW)
    with pytest.raises(Refused):
        group.prepare(5, MIDDLE, "other")
    assert group.promised == NEW


def test_prepared_result_outlives_its_leader_but_not_the_next_exchange() -> None:
    group = prepared_group()
    group.step_back()
    group.begin(5, NEW)
    assert group.check_commit(5, "digest")
    group.join(5, NEW, "others")
    with pytest.raises(Refused):
        group.check_commit(5, "digest")


@pytest.mark.parametrize(
    ("ballot", "void", "survives"), [(MIDDLE, False, False), (NEW, False, True), (NEW, True, False)]
)
def test_abort_voids_its_own_result_and_earlier_ones_only_when_told(ballot: Ballot, void: bool, survives: bool) -> None:
    group = prepared_group(MIDDLE)
    group.abort(5, ballot, void=void)
    assert (group.prepared is not None) is survives


def test_unknown_digests_and_other_rounds_are_refused() -> None:
    group = prepared_group()
    for round_number, digest in ((5, "other"), (4, "digest"), (6, "digest"), (4, "")):
        with pytest.raises(Refused):
            group.check_commit(round_number, digest)
    with pytest.raises(Refused):
        group.begin(6, NEW)


def test_since_tells_what_a_restarted_member_cannot_know() -> None:
    group = Group(5)
    group.begin(5, MIDDLE)
    group.begin(5, NEW)
    assert group.since == MIDDLE


BALLOTS = st.builds(Ballot, st.integers(1, 3), st.sampled_from("ab"))
OPERATIONS = st.tuples(st.sampled_from(["begin", "join", "prepare", "commit", "abort", "void", "step back"]), BALLOTS)


@given(st.lists(OPERATIONS, max_size=30))
def test_promises_only_rise_and_only_prepared_results_are_committed(operations: list[tuple[str, Ballot]]) -> None:
    """This holds for any messages in any order. A refused message changes nothing."""
    group = Group(0)
    prepared: dict[Ballot, bool] = {}
    for name, ballot in operations:
        before = (group.round, group.promised, group.phase, group.prepared)
        digest = f"{ballot.attempt}{ballot.leader_id}"
        try:
            match name:
                case "begin":
                    group.begin(group.round, ballot)
                case "join":
                    group.join(group.round, ballot, "shares")
                    prepared.clear()
                case "prepare":
                    group.prepare(group.round, ballot, digest)
                    prepared[ballot] = True
                case "commit":
                    if group.check_commit(group.round, digest):
                        assert prepared == {ballot: True}
                        group.commit(group.round, digest)
                        prepared.clear()
                        assert group.round == before[0] + 1
                        continue
                case "abort" | "void":
                    group.abort(group.round, ballot, void=name == "void")
                    if group.prepared is None:
                        prepared.clear()
                case _:
                    group.step_back()
        except Refused:
            assert before == (group.round, group.promised, group.phase, group.prepared)
        assert before[1] is None or (group.promised is not None and group.promised >= before[1])
        assert group.active is None or group.active == group.promised


# -- what an earlier attempt left ------------------------------------------------------------------------------------

A, B, C = (PeerId(name) for name in "abc")


def prepared(attempt: int, digest: str = "sum") -> pb.Prepared:
    return pb.Prepared(ballot=pack_ballot(Ballot(attempt, "a")), digest=digest, member_ids=[A, B, C])


def reply(result: pb.Prepared | None = None, since: int = 1) -> pb.BeginReply:
    return pb.BeginReply(prepared=result, since=pack_ballot(Ballot(since, "a")))


def test_nothing_is_prepared() -> None:
    assert unfinished({A: reply(), B: reply()}) is None


def test_what_all_that_are_left_have_prepared_may_have_been_decided() -> None:
    assert unfinished({A: reply(prepared(2)), B: reply(prepared(2))}) == prepared(2)


def test_a_member_that_has_not_prepared_it_knows_better() -> None:
    assert unfinished({A: reply(prepared(2)), B: reply()}) is None


def test_who_was_restarted_since_has_no_say() -> None:
    assert unfinished({A: reply(prepared(2)), B: reply(since=3)}) == prepared(2)


def test_the_newest_counts() -> None:
    assert unfinished({A: reply(prepared(3, "new")), B: reply(prepared(2))}) is None
    assert unfinished({A: reply(prepared(3, "new")), B: reply(prepared(3, "new"))}) == prepared(3, "new")


@pytest.mark.parametrize(("num_lacking", "may_be_decided"), [(2, True), (3, False)])
def test_a_result_of_groups_is_not_decided_before_most_members_hold_it(num_lacking: int, may_be_decided: bool) -> None:
    members = [PeerId(f"peer {number}") for number in range(6)]
    result = pb.Prepared(ballot=pack_ballot(Ballot(2, "l")), digest="d", member_ids=members, decider_ids=members[:2])
    begun = {peer: reply(result if number >= num_lacking else None) for number, peer in enumerate(members[::-1])}
    assert unfinished(begun) == (result if may_be_decided else None)
