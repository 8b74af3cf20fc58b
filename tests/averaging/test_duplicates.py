"""Which member gives up what several count."""

from collections.abc import Mapping, Set

from swarm.averaging import messages
from swarm.averaging.duplicates import duplicates, spare_doubles
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Progress
from swarm.types import PeerId


def _drops(spare: Mapping[str, set[int]] | None = None, **committed: set[int]) -> dict[str, set[int]]:
    begun = {
        PeerId(peer): pb.BeginReply(
            committed_gaps=messages.pack_indices(ids), spare_gaps=messages.pack_indices((spare or {}).get(peer, ()))
        )
        for peer, ids in committed.items()
    }  # fmt: skip
    return {str(peer): drops for peer, drops in duplicates(begun).items()}


def test_who_has_nothing_alone_drops_it_all_and_others_nothing() -> None:
    """As when it was away, and what it had was replayed just before the round was complete: it costs nothing."""
    assert _drops(returned={1, 3}, one={0, 1, 2}, other={3, 4}) == {"returned": {1, 3}}


def test_of_two_that_have_the_same_one_keeps_it() -> None:
    assert _drops(one={1, 3}, other={1, 3}) == {"one": {1, 3}}


def test_needless_spare_replays_are_dropped_whoever_else_could_drop_more() -> None:
    """It was away, and comes back before all of what it had was replayed."""
    held = {"returned": {0, 1, 2, 3}, "one": {4, 0, 1}, "other": {5, 2}}
    assert _drops({"one": {0, 1}, "other": {2}}, **held) == {"one": {0, 1}, "other": {2}}


def test_who_has_nothing_but_needless_spare_replays_drops_these_alone() -> None:
    assert _drops({"one": {0, 1}}, returned={0, 1, 2}, one={0, 1}) == {"one": {0, 1}}


def test_of_two_spare_replays_of_the_same_one_is_kept() -> None:
    assert _drops({"one": {1}, "other": {1}}, one={1, 2}, other={1, 3}) in ({"one": {1}}, {"other": {1}})


def test_spare_replays_of_which_one_is_needed_are_as_any_others() -> None:
    """To take a part of them out costs as much."""
    drops = _drops({"one": {0, 1}}, returned={0, 2}, one={0, 1, 3})
    assert sorted(index for indices in drops.values() for index in indices) == [0]


def test_who_has_little_alone_drops_the_rest_rather_than_others_a_part_each() -> None:
    """It begins its sum again with that little."""
    held = {"returned": {0, 1, 2, 3, 4, 5}, "one": {6, 7, 0, 1, 2}, "other": {8, 9, 3, 4}}
    assert _drops({}, **held) == {"returned": {0, 1, 2, 3, 4}}


def test_what_is_shared_is_shared_equally() -> None:
    held = {"returned": {0, 1, 2, 3, 4, 5}, "one": {6, 7, 0, 1}, "other": {8, 9, 2}}
    drops = _drops({}, **held)
    assert {peer: len(indices) for peer, indices in drops.items()} == {"returned": 1, "one": 1, "other": 1}


def test_who_has_no_doubles_drops_nothing() -> None:
    assert _drops(one={0, 1}, other={2}, third=set()) == {}


def _known(spare: Mapping[str, set[int]], **committed: set[int]) -> dict[PeerId, Set[int]]:
    return spare_doubles(
        {
            PeerId(peer): Progress(
                round=0, lineage="", run_samples=0, num_samples=len(ids), committed=frozenset(ids),
                highest_microbatch=-1, spare=frozenset(spare.get(peer, ())),
            )
            for peer, ids in committed.items()
        }
    )  # fmt: skip


def test_spare_replays_of_what_a_member_has_told_of_are_known_to_be_needless() -> None:
    assert _known({"one": {0}, "other": {2}}, returned={0, 1, 2}, one={0, 3}, other={2}) == {"one": {0}, "other": {2}}


def test_spare_replays_of_which_one_may_be_needed_are_kept() -> None:
    assert _known({"one": {0, 1}}, returned={0, 2}, one={0, 1, 3}) == {}
    assert _known({"one": {0}, "other": {0}}, one={0, 1}, other={0, 2}) == {}, "one of the two is"
