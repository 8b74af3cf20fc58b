"""Whom a hop asks next, and what follows from a failure."""

import random

import pytest

from swarm.errors import (
    DeadlineExceeded,
    IncompatibleVersion,
    MalformedMessage,
    NotAllowed,
    NotReady,
    Overloaded,
    PeerUnavailable,
    RetriesExhausted,
    RoundMismatch,
    SwarmError,
    WrongRun,
    WrongStage,
)
from swarm.hop.retries import PAUSE_SECONDS, SHORTEST_WAIT_SECONDS, HopLimits, Retries, most_sent_on
from swarm.machine.clock import ManualClock
from swarm.routing.router import Router
from swarm.types import PeerId, PeerRecord, PeerState

LIMITS = HopLimits()


class World:
    """A stage with peers, and one microbatch for it."""

    def __init__(self, num_peers: int) -> None:
        self.clock = ManualClock()
        self.router = Router(self.clock, random.Random(0))
        self.records = [
            PeerRecord(peer_id=f"{n:040x}", stage=0, endpoint="", announced_at=0.0, state=PeerState.SERVING)
            for n in range(num_peers)
        ]
        self.router.update(0, self.records)
        self.retries = self.another()

    def another(self) -> Retries:
        return Retries(stage=0, router=self.router, clock=self.clock, limits=LIMITS)

    def seconds_until_asked_again(self, record: PeerRecord) -> float:
        """Of a peer that another microbatch could ask at any time."""
        seconds = 0.0
        while self.retries.choose(4) != record:
            self.clock.advance(0.5)
            seconds += 0.5
        return seconds

    @property
    def is_banned(self) -> bool:
        return bool(self.router.banned(0))


def test_a_peer_that_failed_is_asked_again_after_others() -> None:
    world = World(2)
    failed = world.retries.choose(4)
    assert failed is not None
    world.retries.note(failed, NotReady("leaving"))
    other = world.retries.choose(4)
    assert other is not None
    assert other != failed
    world.retries.note(other, NotReady("leaving"))
    assert world.retries.choose(4) is None
    world.clock.advance(PAUSE_SECONDS)
    assert world.retries.choose(4) is not None


def test_a_peer_that_stalls_is_left_alone_for_long_only_if_another_one_can_be_asked() -> None:
    alone = World(1)
    alone.retries.note(alone.records[0], DeadlineExceeded("no result"))
    assert alone.seconds_until_asked_again(alone.records[0]) == PAUSE_SECONDS
    two = World(2)
    two.retries.note(two.records[0], DeadlineExceeded("no result"))
    two.router.busy(PeerId(two.records[1].peer_id), 300.0)
    assert two.seconds_until_asked_again(two.records[0]) == LIMITS.stall_seconds
    with_a_banned_one = World(2)
    with_a_banned_one.router.failed(PeerId(with_a_banned_one.records[1].peer_id))
    with_a_banned_one.retries.note(with_a_banned_one.records[0], DeadlineExceeded("no result"))
    assert with_a_banned_one.seconds_until_asked_again(with_a_banned_one.records[0]) == PAUSE_SECONDS


@pytest.mark.parametrize(
    ("error", "is_banned", "num_failures"),
    [
        (PeerUnavailable("died"), True, 1),
        (DeadlineExceeded("slow"), False, 1),
        (RoundMismatch("elsewhere", peer_round=3), False, 1),
        (NotAllowed("no token"), True, 1),
        (IncompatibleVersion("6"), True, 1),
        (MalformedMessage("no number"), True, 1),
        (NotReady("joining"), False, 0),
        (WrongStage("2"), False, 0),
        (WrongRun("other"), False, 0),
        (Overloaded("full", retry_after_seconds=0.1), False, 0),
    ],
)
def test_what_a_failure_means(error: SwarmError, is_banned: bool, num_failures: int) -> None:
    world = World(2)
    world.retries.note(world.records[0], error)
    assert (world.is_banned, world.retries.num_failures) == (is_banned, num_failures)


def test_after_many_failures_it_is_given_up() -> None:
    world = World(2)
    for _ in range(LIMITS.max_failures - 1):
        world.retries.note(world.records[0], DeadlineExceeded("slow"))
    with pytest.raises(RetriesExhausted, match="stage 0: 12 peers failed in a row; the last: slow"):
        world.retries.note(world.records[0], DeadlineExceeded("slow"))


def test_that_it_is_malformed_a_second_peer_has_to_say() -> None:
    world = World(2)
    world.retries.note(world.records[0], MalformedMessage("no number"))
    with pytest.raises(MalformedMessage, match="no number"):
        world.retries.note(world.records[1], MalformedMessage("no number"))
    with pytest.raises(MalformedMessage):
        World(1).retries.note(World(1).records[0], MalformedMessage("there is no other"))


def test_a_peer_that_has_no_room_is_asked_again_when_it_says() -> None:
    world = World(1)
    world.retries.note(world.records[0], Overloaded("full", retry_after_seconds=0.1))
    assert world.retries.is_refused
    assert world.retries.num_busy == 1
    assert world.retries.choose(4) is None
    assert world.retries.wait_seconds() == pytest.approx(0.1)
    world.clock.advance(0.0999)
    assert world.retries.wait_seconds() == SHORTEST_WAIT_SECONDS
    world.clock.advance(0.01)
    assert world.retries.choose(4) == world.records[0]
    world.retries.accepted()
    assert not world.retries.is_refused


def test_a_peer_that_leaves_it_to_others_has_not_refused_it() -> None:
    world = World(8)
    for record in world.records[:3]:
        world.retries.offered(PeerId(record.peer_id))
        world.retries.note(record, Overloaded("work waits", retry_after_seconds=0.1))
    assert (world.retries.num_sent_on, world.retries.num_busy) == (2, 1), "the third was not told of others"


def test_a_peer_that_knows_it_is_asked_first_and_not_told_of_others() -> None:
    world = World(8)
    known = PeerId(world.records[5].peer_id)
    world.retries.handed_over(known)
    assert world.retries.choose(4) == world.records[5]
    world.retries.offered(known)
    assert not world.retries.has_others


def test_it_is_sent_on_four_times_at_most() -> None:
    assert [most_sent_on(num_peers) for num_peers in (0, 3, 4, 15, 16, 10_000)] == [0, 0, 1, 3, 4, 4]


def test_each_stall_doubles_the_patience_three_times_at_most() -> None:
    world = World(1)
    peer_id = PeerId(world.records[0].peer_id)
    for doublings in (0, 1, 2, 3, 3):
        patience = LIMITS.stall_seconds * 2**doublings
        world.retries.require_no_stall(peer_id, 4, patience)
        with pytest.raises(DeadlineExceeded):
            world.retries.require_no_stall(peer_id, 4, patience + 1)
