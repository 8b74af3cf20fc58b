"""The router against a model of which peers may be chosen, in any order of events."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from swarm.routing.router import Router
from swarm.routing.throughput import Observation
from swarm.types import Block, PeerId, PeerRecord, PeerState
from tests.routing.records import id_of, record_of
from tests.support.manual_clock import ManualClock


class _Model(RuleBasedStateMachine):
    """Compares the router with a list of the peers that may be chosen."""

    peers = st.integers(0, 5)

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.records: dict[int, PeerRecord] = {}
        self.ban_ends: dict[int, float] = {}
        """Latest time at which each peer's ban is over."""
        self.ban_holds: dict[int, float] = {}
        """Time before which no announcement ends a peer's ban."""
        self.busy_until: dict[int, float] = {}

    @initialize(seed=st.integers(0, 100))
    def build(self, seed: int) -> None:
        self.router = Router(self.clock, random.Random(seed))

    def serving(self) -> set[int]:
        return {number for number, record in self.records.items() if record.state is PeerState.SERVING}

    def is_banned(self, number: int) -> bool:
        return id_of(number) in self.router.banned(Block(0))

    def certainly_banned(self) -> set[int]:
        return {number for number, until in self.ban_holds.items() if self.clock.monotonic() < until}

    @rule(
        changes=st.dictionaries(peers, st.sampled_from([*PeerState, None]), max_size=6),
        rate=st.sampled_from([0.0, 0.5, 4.0]),
    )
    def announce(self, changes: dict[int, PeerState | None], rate: float) -> None:
        for number, state in changes.items():
            if state is None:
                self.records.pop(number, None)
            else:
                self.records[number] = record_of(
                    number, announced_at=self.clock.time(), state=state, samples_per_second=rate
                )
        self.router.update(Block(0), list(self.records.values()))
        self.busy_until = {number: until for number, until in self.busy_until.items() if number in self.serving()}

    @rule(exclude=st.sets(peers), prefer=st.none() | peers, num_samples=st.integers(1, 4))
    def choose(self, exclude: set[int], prefer: int | None, num_samples: int) -> None:
        record = self.router.choose(
            Block(0),
            num_samples,
            exclude={id_of(number) for number in exclude},
            prefer=None if prefer is None else id_of(prefer),
        )
        now = self.clock.monotonic()
        if record is None:
            certain = {
                number
                for number in self.serving() - exclude
                if self.ban_ends.get(number, 0.0) <= now and self.busy_until.get(number, 0.0) <= now
            }
            assert not certain
            return
        number = int(record.peer_id, 16)
        assert number in self.serving() - exclude - self.certainly_banned()
        assert record == self.records[number]
        if number != prefer:
            assert self.busy_until.get(number, 0.0) <= now

    @rule(number=peers, busy=st.floats(0.2, 4.0), link=st.none() | st.floats(0.0, 1.0), queue_length=st.integers(0, 3))
    def succeed(self, number: int, busy: float, link: float | None, queue_length: int) -> None:
        self.router.succeeded(
            Block(0),
            id_of(number),
            Observation(num_samples=2, busy_seconds=busy, link_seconds=link, queue_length=queue_length),
        )
        if number in self.serving():
            self.ban_ends.pop(number, None)
            self.ban_holds.pop(number, None)

    @rule(number=peers)
    def fail(self, number: int) -> None:
        if number not in self.serving():
            self.router.failed(Block(0), id_of(number))
            return
        was_banned = self.is_banned(number)
        self.router.failed(Block(0), id_of(number))
        assert self.is_banned(number)
        if not was_banned:
            self.ban_holds[number] = self.clock.monotonic() + 5.0
            self.ban_ends[number] = self.clock.monotonic() + 300.0

    @rule(number=peers, retry_after=st.floats(0, 20))
    def busy(self, number: int, retry_after: float) -> None:
        self.router.busy(Block(0), id_of(number), retry_after)
        if number in self.serving():
            self.busy_until[number] = max(self.busy_until.get(number, 0.0), self.clock.monotonic() + retry_after)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 30.0, 400.0]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def everybody_gets_a_turn(self) -> None:
        self.clock.advance(400.0)
        waiting = self.serving()
        for _ in range(20_000):
            if not waiting:
                break
            record = self.router.choose(Block(0), 1)
            assert record is not None
            waiting.discard(int(record.peer_id, 16))
        assert not waiting

    @invariant()
    def the_serving_are_known(self) -> None:
        if not hasattr(self, "router"):
            return
        known = {PeerId(record.peer_id) for record in self.router.records(Block(0))}
        assert known == {id_of(number) for number in self.serving()}
        assert all((self.router.expected_seconds(Block(0), peer_id, 1) or 1.0) > 0 for peer_id in known)
        assert (self.router.next_available_seconds(Block(0)) is None) == (not self.serving())
        left_alone = {PeerId(each.record.peer_id): each for each in self.router.left_alone(Block(0))}
        assert {peer_id for peer_id, each in left_alone.items() if not each.is_busy} == self.router.banned(Block(0))
        assert all(each.until > self.clock.monotonic() for each in left_alone.values())
        if left_alone.keys() == known and known:
            first = min(each.until for each in left_alone.values()) - self.clock.monotonic()
            assert self.router.next_available_seconds(Block(0)) == pytest.approx(first)


TestModel = _Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30, derandomize=True)
