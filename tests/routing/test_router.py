"""The router as the hop and the simulator use it."""

import heapq
import itertools
import random
from collections import Counter
from typing import Any

import pytest

from swarm.routing.bans import DISTRUST_SECONDS
from swarm.routing.router import Router
from swarm.routing.throughput import Observation
from swarm.types import Block, PeerId, PeerRecord, PeerState
from tests.routing.records import id_of, record_of
from tests.support.manual_clock import ManualClock


def _router(*records: PeerRecord, seed: int = 0) -> tuple[Router, ManualClock]:
    clock = ManualClock()
    router = Router(clock, random.Random(seed))
    router.update(Block(0), records)
    return router, clock


def _path(router: Router, num_choices: int, *, links: dict[int, float] | None = None) -> list[int]:
    """Choose peers and let them reply; every peer computes as fast as it announced."""
    path = []
    for _ in range(num_choices):
        record = router.choose(Block(0), 4)
        assert record is not None
        number = int(record.peer_id, 16)
        router.succeeded(
                Block(0),
            PeerId(record.peer_id),
            Observation(
                num_samples=4, busy_seconds=4 / record.samples_per_second, link_seconds=(links or {}).get(number, 0.0),
                queue_length=0,
            ),
        )  # fmt: skip
        path.append(number)
    return path


def test_a_seed_is_a_path() -> None:
    records = [record_of(number, samples_per_second=float(number)) for number in (1, 2, 3)]
    paths = [_path(_router(*records, seed=seed)[0], 100) for seed in (7, 7, 8)]
    assert paths[0] == paths[1]
    assert paths[0] != paths[2]


def test_of_two_equal_peers_the_nearer_gets_more() -> None:
    router, _ = _router(record_of(1, samples_per_second=20.0), record_of(2, samples_per_second=20.0))
    counts = Counter(_path(router, 1200, links={2: 0.1}))
    # 4 samples: 200 ms here, 300 ms there.
    assert counts[1] / counts[2] == pytest.approx(1.5, rel=0.1)


def _keep_in_flight(in_flight: int, links: list[float], num_replies: int = 4000) -> list[float]:
    """The shares of peers behind these links; each computes one microbatch after the other, in 20 ms each."""
    clock, events, order = ManualClock(), list[tuple[float, int, int, bool]](), itertools.count()
    router = Router(clock, random.Random(0))
    router.update(Block(0), [record_of(number, samples_per_second=50.0) for number in range(len(links))])
    free_at, waiting, sent = [0.0] * len(links), [0] * len(links), [0] * len(links)

    def send() -> None:
        record = router.choose(Block(0), 1)
        assert record is not None
        number = int(record.peer_id, 16)
        sent[number] += 1
        heapq.heappush(events, (clock.monotonic() + links[number], next(order), number, True))

    for _ in range(in_flight):
        send()
    for _ in range(2 * num_replies):
        at, _, number, arrives = heapq.heappop(events)
        clock.advance(at - clock.monotonic())
        if arrives:
            waiting[number] += 1
            free_at[number] = max(free_at[number], at) + 0.02
            heapq.heappush(events, (free_at[number], next(order), number, False))
        else:
            waiting[number] -= 1
            router.succeeded(
                Block(0),
                id_of(number),
                Observation(num_samples=1, busy_seconds=0.02, link_seconds=links[number], queue_length=waiting[number]),
            )
            send()
    return [number / sum(sent) for number in sent]


def test_a_far_peer_is_used_fully_once_the_near_one_is_saturated() -> None:
    """A link delays, but does not lower throughput: with enough in flight, the near peer's queue hides its cost."""
    assert _keep_in_flight(2, [0.0, 0.1])[1] < 0.25
    assert _keep_in_flight(32, [0.0, 0.1])[1] == pytest.approx(0.5, abs=0.02)


def test_a_hint_comes_first_unless_excluded_banned_or_gone() -> None:
    router, _ = _router(record_of(1), record_of(2), record_of(3))

    def chosen(**options: Any) -> str | None:
        record = router.choose(Block(0), 1, **options)
        return None if record is None else record.peer_id

    assert {chosen(prefer=id_of(1)) for _ in range(10)} == {id_of(1)}
    assert chosen(prefer=id_of(1), exclude={id_of(1)}) != id_of(1)
    assert chosen(prefer=id_of(9)) is not None
    router.failed(Block(0), id_of(2))
    assert chosen(prefer=id_of(2), exclude={id_of(1)}) == id_of(3)
    assert chosen(exclude={id_of(1), id_of(3)}) is None
    assert chosen(exclude={id_of(1)}) == id_of(3)


def test_the_own_peer_comes_after_hints_and_before_all_others_unless_it_is_busy_banned_or_excluded() -> None:
    clock = ManualClock()
    router = Router(clock, random.Random(0), own=id_of(2))
    router.update(Block(0), [record_of(number) for number in (1, 2, 3)])
    router.update(Block(1), [record_of(number) for number in (4, 5)])

    def chosen(**how: Any) -> str | None:
        record = router.choose(Block(0), 4, **how)
        return None if record is None else record.peer_id

    assert {chosen() for _ in range(20)} == {id_of(2)}
    assert chosen(prefer=id_of(3)) == id_of(3)
    assert chosen(exclude={id_of(2)}) != id_of(2)
    router.busy(Block(0), id_of(2), 1.0)
    assert {chosen() for _ in range(20)} == {id_of(1), id_of(3)}
    clock.advance(1.5)
    assert chosen() == id_of(2)
    router.failed(Block(0), id_of(2))
    assert {chosen() for _ in range(20)} == {id_of(1), id_of(3)}
    assert router.links(Block(0)).keys() == {id_of(1), id_of(3)}
    other = router.choose(Block(1), 4)
    assert other is not None, "a stage that the own peer does not serve"


def test_a_peer_is_at_each_block_until_its_record_there_is_gone_or_says_that_it_leaves() -> None:
    router, _ = _router(record_of(1, announced_at=1.0))
    router.update(Block(1), [record_of(1, stage=1, announced_at=2.0)])
    router.update(Block(1, 1), [record_of(1, stage=1, variant=1, announced_at=3.0)])
    for block in (Block(0), Block(1), Block(1, 1)):
        record = router.choose(block, 1)
        assert record is not None
        assert (record.block, router.record(block, id_of(1))) == (block, record)
    router.update(Block(0), [record_of(1, announced_at=4.0, state="leaving")])
    assert [router.num_peers(block) for block in (Block(0), Block(1), Block(1, 1))] == [0, 1, 1]
    router.update(Block(1), [])
    assert [router.num_peers(block) for block in (Block(0), Block(1), Block(1, 1))] == [0, 0, 1]


def test_what_is_known_of_a_peer_is_known_of_it_at_one_block() -> None:
    first, second = Block(0), Block(1)
    router, _ = _router(record_of(1), record_of(2))
    router.update(second, [record_of(1, stage=1), record_of(2, stage=1)])
    slow = Observation(num_samples=1, busy_seconds=3.0, link_seconds=0.0, queue_length=0)
    for _ in range(50):
        router.succeeded(first, id_of(1), slow)
    assert router.expected_seconds(first, id_of(1), 1) == pytest.approx(3.0, rel=0.01)
    assert router.expected_seconds(second, id_of(1), 1) == pytest.approx(1.0)
    router.busy(first, id_of(1), 5.0)
    router.failed(first, id_of(2), reason="its weights are broken")
    assert router.choose(first, 1) is None
    assert (router.banned(second), router.left_alone(second)) == (set(), [])


@pytest.mark.parametrize("how", ["is_gone", "is_unreachable"])
def test_a_process_that_does_not_answer_at_one_block_is_left_alone_at_all(how: str) -> None:
    first, second, third = Block(0), Block(1), Block(2)
    router, clock = _router(record_of(1))
    router.update(second, [record_of(1, stage=1), record_of(2, stage=1)])
    router.update(third, [record_of(1, stage=2, endpoint="192.0.2.9:1")])
    router.failed(first, id_of(1), **{how: True})  # type: ignore[arg-type]
    assert [router.banned(block) for block in (first, second)] == [{id_of(1)}] * 2
    assert router.banned(third) == set(), "it is another process there"
    clock.advance(2.0)
    router.answered(second, id_of(1))
    assert router.banned(first) == (set() if how == "is_unreachable" else {id_of(1)})


def test_of_a_stage_without_peers_it_is_known_which_was_the_last_one_and_what_became_of_it() -> None:
    clock = ManualClock(100.0)
    router = Router(clock, random.Random(0))
    assert router.gone(Block(1)) is None
    fields: dict[str, Any] = {"stage": 1, "endpoint": "192.0.2.1:5001", "state": PeerState.SERVING}
    older = PeerRecord(peer_id="ab" * 20, name="gpu-1", announced_at=clock.time() - 5.0, **fields)
    last = PeerRecord(peer_id="cd" * 20, name="gpu-2", announced_at=clock.time(), **fields)
    router.update(Block(1), [older, last])
    assert router.gone(Block(1)) is None
    clock.advance(21.0)
    router.update(Block(1), [])
    clock.advance(3.0)
    router.update(Block(1), [])
    gone = router.gone(Block(1))
    assert gone is not None
    assert gone.in_words(clock.monotonic()) == "its last one, gpu-2, fell silent 24 s ago"
    router.update(Block(1), [older])
    assert router.gone(Block(1)) is None
    router.update(Block(1), [older.model_copy(update={"state": PeerState.LEAVING})])
    gone = router.gone(Block(1))
    assert gone is not None
    assert gone.in_words(clock.monotonic()).startswith("its last one, gpu-1, left ")


def test_a_distrusted_peer_gets_no_work_until_its_time_is_over() -> None:
    router, clock = _router(record_of(1, samples_per_second=20.0), record_of(2, samples_per_second=20.0))
    until = clock.monotonic() + DISTRUST_SECONDS
    router.distrust(id_of(1), "it computes wrongly")
    assert set(_path(router, 20)) == {2}
    assert router.others(Block(0), id_of(2)) == []
    (alone,) = router.left_alone(Block(0))
    assert (alone.record.peer_id, alone.reason, alone.until) == (id_of(1), "it computes wrongly", until)
    clock.advance(DISTRUST_SECONDS)
    assert router.left_alone(Block(0)) == []
    assert set(_path(router, 20)) == {1, 2}
