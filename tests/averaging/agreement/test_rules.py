"""Which result counts, and who drops what two members count."""

import pytest

from swarm.averaging.agreement.messages import pack_indices
from swarm.averaging.agreement.rules import agreed, duplicates
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId


@pytest.mark.parametrize(("own", "expected"), [("b", 2.0), ("x", 2.0)])
def test_no_single_member_s_word_decides_the_norm(own: str, expected: float) -> None:
    norms = {"a": 1e290, "b": 2.0, "c": 1.9}
    results = {PeerId(peer): pb.Prepared(digest="d", squared_norm=norm) for peer, norm in norms.items()}
    assert agreed(results, PeerId(own)).squared_norm == expected


def _drops(**committed: set[int]) -> dict[str, set[int]]:
    begun = {PeerId(peer): pb.BeginReply(committed_gaps=pack_indices(ids)) for peer, ids in committed.items()}
    return {str(peer): drops for peer, drops in duplicates(begun).items()}


def test_who_has_nothing_alone_drops_it_all_and_others_nothing() -> None:
    """The member was away, for example, and all of its microbatches were replayed. Dropping them costs nothing."""
    assert _drops(returned={1, 3}, one={0, 1, 2}, other={3, 4}) == {"returned": {1, 3}}


def test_of_two_that_have_the_same_one_keeps_it() -> None:
    assert _drops(one={1, 3}, other={1, 3}) == {"one": {1, 3}}


def test_who_has_little_alone_drops_the_rest_rather_than_others_a_part_each() -> None:
    """The member recomputes its sum from the few microbatches that only it has."""
    held = {"returned": {0, 1, 2, 3, 4, 5}, "one": {6, 7, 0, 1, 2}, "other": {8, 9, 3, 4}}
    assert _drops(**held) == {"returned": {0, 1, 2, 3, 4}}


def test_what_is_shared_is_shared_equally() -> None:
    held = {"returned": {0, 1, 2, 3, 4, 5}, "one": {6, 7, 0, 1}, "other": {8, 9, 2}}
    drops = _drops(**held)
    assert {peer: len(indices) for peer, indices in drops.items()} == {"returned": 1, "one": 1, "other": 1}


def test_who_has_no_doubles_drops_nothing() -> None:
    assert _drops(one={0, 1}, other={2}, third=set()) == {}


def test_of_what_a_returned_member_had_nobody_computes_more_than_a_third_again() -> None:
    """This holds for any share of its microbatches that was replayed before the member came back."""
    for num_replayed in range(33):
        half = num_replayed // 2
        held = {
            "returned": set(range(32)),
            "one": {*range(32, 64), *range(half)},
            "other": {*range(64, 96), *range(half, num_replayed)},
        }
        again = {peer: min(len(drops), len(held[peer]) - len(drops)) for peer, drops in _drops(**held).items()}
        assert max(again.values(), default=0) <= 32 / 3
