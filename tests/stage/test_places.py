"""How many texts a peer takes, in all and from each caller."""

import pytest

from swarm.errors import Overloaded
from swarm.rpc.callers import Caller
from swarm.stage.places import Places, SessionLimits

ONE, OTHER = Caller("one"), Caller("other")


def _refused(places: Places, caller: Caller, num_bytes: int, reason: str) -> None:
    with pytest.raises(Overloaded, match=reason), places.taken(caller, num_bytes):
        pass


def test_one_caller_leaves_room_for_others() -> None:
    places = Places(SessionLimits(max_sessions=4, max_bytes=100))
    with places.taken(ONE, 10), places.taken(ONE, 10):
        _refused(places, ONE, 10, "no room for more than 2 sessions of one caller")
        with places.taken(OTHER, 50):
            assert len(places) == 3
            _refused(places, OTHER, 10, "no room for more than 50 bytes of one caller's sessions")
            _refused(places, Caller("third"), 31, "no room for more than 100 bytes of sessions")
            with places.taken(Caller("third"), 30):
                _refused(places, Caller("fourth"), 0, "no room for more than 4 sessions$")
    assert len(places) == 0


def test_a_single_text_may_take_all_of_the_memory_and_no_more() -> None:
    places = Places(SessionLimits(max_sessions=4, max_bytes=100))
    with places.taken(ONE, 100):
        pass
    _refused(places, ONE, 101, "bytes of sessions")


def test_a_peer_may_take_none() -> None:
    _refused(Places(SessionLimits(max_sessions=0)), ONE, 1, "takes no sessions")
