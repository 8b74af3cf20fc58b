"""Which peer a hop asks next, and the consequences of a failure."""

import random
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from swarm.hop.answers import LONGEST_CAUSES, Obstacle, pack_obstacle
from swarm.hop.retries import PAUSE_SECONDS, SHORTEST_WAIT_SECONDS, HopContext, HopLimits, Retries, most_sent_on
from swarm.machine.words import Repeats
from swarm.routing.router import Router
from swarm.routing.throughput import Observation
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import Block, PeerId, PeerRecord, PeerState
from tests.support.manual_clock import ManualClock

LIMITS = HopLimits()


class World:
    """A stage with peers, and one microbatch for it."""

    def __init__(self, num_peers: int) -> None:
        self.clock = ManualClock()
        self.repeats = Repeats(self.clock)
        self.router = Router(self.clock, random.Random(0))
        self.channels = Mock(spec=ChannelPool)
        self.records = [
            PeerRecord(
                peer_id=f"{n:040x}", name=f"gpu-{n}", stage=0, endpoint=f"192.0.2.{n}:5001", announced_at=0.0,
                state=PeerState.SERVING,
            )
            for n in range(num_peers)
        ]  # fmt: skip
        self.router.update(Block(0), self.records)
        self.retries = self.another()

    def another(self, limits: HopLimits = LIMITS) -> Retries:
        context = HopContext(
            run_id="run", block=Block(0), router=self.router, channels=self.channels, clock=self.clock,
            limits=limits,
        )  # fmt: skip
        return Retries(context, self.repeats)

    def seconds_until_asked_again(self, record: PeerRecord) -> float:
        """How long this microbatch does not ask a peer which another microbatch could ask at once."""
        seconds = 0.0
        while self.retries.choose(4) != record:
            self.clock.advance(0.5)
            seconds += 0.5
        return seconds

    @property
    def is_banned(self) -> bool:
        return bool(self.router.banned(Block(0)))


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
    two.router.busy(Block(0), PeerId(two.records[1].peer_id), 300.0)
    assert two.seconds_until_asked_again(two.records[0]) == LIMITS.stall_seconds
    with_a_banned_one = World(2)
    with_a_banned_one.router.failed(Block(0), PeerId(with_a_banned_one.records[1].peer_id))
    with_a_banned_one.retries.note(with_a_banned_one.records[0], DeadlineExceeded("no result"))
    assert with_a_banned_one.seconds_until_asked_again(with_a_banned_one.records[0]) == PAUSE_SECONDS


@pytest.mark.parametrize(
    ("error", "is_banned", "num_failures"),
    [
        (PeerUnavailable("died"), True, 1),
        (DeadlineExceeded("slow"), False, 1),
        (RoundMismatch("elsewhere"), False, 1),
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
    assert world.retries.candidates.wait_seconds() == pytest.approx(0.1)
    world.clock.advance(0.0999)
    assert world.retries.candidates.wait_seconds() == SHORTEST_WAIT_SECONDS
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
    world.retries.route.handed_over(known)
    assert world.retries.choose(4) == world.records[5]
    world.retries.offered(known)
    assert not world.retries.has_others


def test_it_is_sent_on_four_times_at_most() -> None:
    assert [most_sent_on(num_peers) for num_peers in (0, 3, 4, 15, 16, 10_000)] == [0, 0, 1, 3, 4, 4]


@pytest.mark.parametrize(
    ("num_peers", "round_microbatches", "times"), [(2, 2, 1), (2, 4, 1), (3, 2, 2), (2, 5, 0), (2, None, 0), (1, 1, 0)]
)
def test_of_few_peers_it_is_sent_on_where_a_round_has_few_for_each(
    num_peers: int, round_microbatches: int | None, times: int
) -> None:
    world = World(num_peers)
    retries = world.another(HopLimits(round_microbatches=round_microbatches))
    for number, record in enumerate(world.records):
        retries.offered(PeerId(record.peer_id))
        assert retries.has_others == (number < times)
        retries.note(record, Overloaded("it has its part", retry_after_seconds=0.1))
    assert retries.num_sent_on == times


@pytest.mark.parametrize(("num_peers", "round_microbatches"), [(2, 2), (4, None)])
@pytest.mark.parametrize(("seconds", "has_others"), [(1.9, True), (2.1, False)])
def test_it_is_not_sent_on_to_a_peer_that_takes_longer_than_this_one_would_for_two(
    num_peers: int, round_microbatches: int | None, seconds: float, has_others: bool
) -> None:
    world = World(num_peers)
    for record, busy_seconds in zip(world.records, (*[1.0] * (num_peers - 1), seconds), strict=True):
        observation = Observation(num_samples=1, busy_seconds=busy_seconds, link_seconds=0.0, queue_length=0)
        world.router.succeeded(Block(0), PeerId(record.peer_id), observation)
    retries = world.another(HopLimits(round_microbatches=round_microbatches))
    retries.offered(PeerId(world.records[0].peer_id))
    assert retries.has_others == has_others


def test_each_stall_doubles_the_patience_three_times_at_most() -> None:
    world = World(1)
    peer_id = PeerId(world.records[0].peer_id)
    for doublings in (0, 1, 2, 3, 3):
        patience = LIMITS.stall_seconds * 2**doublings
        world.retries.require_no_stall(peer_id, 4, patience)
        with pytest.raises(DeadlineExceeded):
            world.retries.require_no_stall(peer_id, 4, patience + 1)


def test_the_line_to_a_peer_that_does_not_answer_may_have_become_slow() -> None:
    world = World(2)
    world.retries.note(world.records[0], PeerUnavailable("no sign of life", is_unreachable=True))
    world.retries.note(world.records[1], PeerUnavailable("this peer is out of memory"))
    world.channels.lost.assert_called_once_with(world.records[0])


def test_that_all_peers_of_a_stage_failed_is_told_with_each_cause_and_when_one_is_tried_again() -> None:
    world = World(2)
    assert world.retries.candidates.obstacle() is None
    world.retries.note(world.records[0], PeerUnavailable("UNAVAILABLE: watchdog", is_unreachable=True))
    assert world.retries.choose(4) == world.records[1]
    world.retries.note(world.records[1], PeerUnavailable("this peer is out of memory"))
    assert world.retries.choose(4) is None
    another = world.another()
    assert another.candidates.obstacle() is None, "it has asked nobody yet"
    assert another.choose(4) is None
    told = another.candidates.obstacle()
    assert told == world.retries.candidates.obstacle()
    assert told is not None
    assert told.in_words(Block(1)) == (
        "both peers of stage 1 failed just now (gpu-0 at 192.0.2.0:5001: no answer; gpu-1: this peer is out of "
        "memory), tried again in 5 s"
    )
    world.clock.advance(5.0)
    assert world.retries.choose(4) is not None


def test_that_a_stage_has_no_peer_is_told_of_an_empty_stage_alone() -> None:
    world = World(1)
    for error in (
        PeerUnavailable("died", is_gone=True), DeadlineExceeded("no result"), NotReady("joining"),
        Overloaded("full", retry_after_seconds=9.0), NotAllowed("its clock is wrong"),
    ):  # fmt: skip
        world = World(1)
        world.retries.note(world.records[0], error)
        for _ in range(50):
            if world.retries.choose(4) is not None:
                world.retries.note(world.records[0], NotReady("joining"))
            told = world.retries.candidates.obstacle()
            assert told is None or not told.is_empty_stage
            world.clock.advance(0.1)
        assert told is not None, "a microbatch that has waited for five seconds"
        assert "gpu-0" in told.in_words(Block(0))
    world.router.update(Block(0), [])
    assert world.retries.choose(4) is None
    assert world.retries.candidates.obstacle() == Obstacle(num_peers=0)


def test_peers_that_have_no_room_for_a_moment_are_no_obstacle() -> None:
    world = World(2)
    for record in world.records:
        world.retries.note(record, Overloaded("work waits here already", retry_after_seconds=3.0))
    assert world.retries.choose(4) is None
    assert world.retries.candidates.obstacle() is None
    world.clock.advance(2.0)
    for record in world.records:
        world.retries.note(record, Overloaded("work waits here already", retry_after_seconds=3.0))
    world.clock.advance(2.0)
    assert world.retries.choose(4) is None
    told = world.retries.candidates.obstacle()
    assert told is not None
    assert told.in_words(Block(0)) == "both peers of stage 0 take no work now (gpu-0, gpu-1: work waits here already)"
    world.retries.accepted()
    assert world.retries.candidates.obstacle() is None


def test_a_peer_that_fails_many_microbatches_is_one_line_a_cause(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world = World(2)
    for _ in range(20):
        world.another().note(world.records[0], DeadlineExceeded("no result after 120 s"))
    world.another().note(world.records[0], PeerUnavailable("died", is_gone=True))
    world.clock.advance(61.0)
    world.another().note(world.records[0], DeadlineExceeded("no result after 240 s"))
    assert caplog.messages == [
        "stage 0: gpu-0 failed: no result after 120 s",
        "stage 0: gpu-0 failed: died",
        "stage 0: gpu-0 failed: no result after 240 s, 20 times since this was said last",
    ]


@given(st.builds(
    pb.Obstacle, num_peers=st.integers(0, 2**32 - 1), num_busy=st.integers(0, 2**32 - 1), causes=st.text(),
    num_silent=st.integers(0, 2**32 - 1), retry_seconds=st.floats(),
))  # fmt: skip
def test_what_another_peer_tells_of_a_stage_is_always_a_short_line(message: pb.Obstacle) -> None:
    assert len(Obstacle.read(message).in_words(Block(3))) < 2000


def test_an_obstacle_travels() -> None:
    obstacle = Obstacle(num_peers=3, num_busy=1, num_silent=1, causes="a: no answer", seconds=2.5)
    packed = pack_obstacle(obstacle)
    assert packed is not None
    assert Obstacle.read(packed) == obstacle
    assert pack_obstacle(None) is None
    assert len(Obstacle.read(pb.Obstacle(causes="x" * 10_000)).causes) == LONGEST_CAUSES
