"""Credits: one microbatch each."""

from swarm.routing.credits import Credits
from swarm.types import PeerId

PEER, OTHER = PeerId("a" * 40), PeerId("b" * 40)


def test_a_credit_is_good_for_one_microbatch_at_its_peer() -> None:
    credits = Credits()
    assert not credits.take(PEER)
    credits.granted(PEER, 1)
    assert not credits.take(OTHER)
    assert credits.take(PEER)
    assert not credits.take(PEER)


def test_the_newest_reply_counts_and_a_failure_voids_all() -> None:
    credits = Credits()
    credits.granted(PEER, 2)
    credits.granted(PEER, 0)
    assert not credits.take(PEER)
    credits.granted(PEER, 1)
    credits.drop(PEER)
    assert not credits.take(PEER)
