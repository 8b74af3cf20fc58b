"""What a new leader finds of an attempt whose leader is gone."""

from swarm.averaging.group import Ballot
from swarm.averaging.messages import pack_ballot
from swarm.averaging.unfinished import unfinished
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId

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
