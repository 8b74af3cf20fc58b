"""What a leader decides from its members' answers."""

from swarm.averaging import messages
from swarm.averaging.leader import _duplicates
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId


def _drops(**committed: set[int]) -> dict[str, set[int]]:
    begun = {PeerId(peer): pb.BeginReply(committed_gaps=messages.pack_indices(ids)) for peer, ids in committed.items()}
    return {str(peer): drops for peer, drops in _duplicates(begun).items()}


def test_who_has_nothing_alone_drops_it_all_and_others_nothing() -> None:
    """As when it was away, and what it had was replayed just before the round was complete: it costs nothing."""
    assert _drops(returned={1, 3}, one={0, 1, 2}, other={3, 4}) == {"returned": {1, 3}}


def test_of_two_that_have_the_same_one_keeps_it() -> None:
    assert _drops(one={1, 3}, other={1, 3}) == {"one": {1, 3}}


def test_who_has_no_doubles_drops_nothing() -> None:
    assert _drops(one={0, 1}, other={2}, third=set()) == {}
