"""Peers that have nothing to do: asked before their time, as long as that is certain and costs nobody a share."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from swarm.routing.peer_queue import PeerQueue
from tests.routing.records import id_of, record_of


def _choose(queue: PeerQueue, now: float = 0.0) -> int:
    record = queue.choose(1, now, exclude=(), prefer=())
    assert record is not None
    return int(record.peer_id, 16)


def _succeed(queue: PeerQueue, number: int, now: float = 0.0, queue_length: int = 0) -> None:
    queue.succeeded(id_of(number), now, num_samples=1, busy_seconds=1.0, link_seconds=0.0, queue_length=queue_length)


def test_who_has_nothing_to_do_goes_before_its_time_but_not_for_long() -> None:
    queue = PeerQueue(random.Random(0))
    queue.update([record_of(number) for number in range(8)], 0.0)
    for number in [_choose(queue) for _ in range(100)]:
        _succeed(queue, number, queue_length=1)
    chosen = []
    for _ in range(6):
        _succeed(queue, 5)
        chosen.append(_choose(queue))
    assert 1 <= chosen.count(5) <= 4
    assert chosen[0] == 5
    counts: Counter[int] = Counter()
    for _ in range(800):
        number = _choose(queue)
        _succeed(queue, number, queue_length=0 if number == 5 else 1)
        counts[number] += 1
    assert counts[5] / 800 == pytest.approx(2 / 9, rel=0.1), "half the time there, twice the share, and no more"


def _busy(queue: PeerQueue) -> None:
    queue.busy(id_of(2), 0.0, 3.0)


def _busy_and_answers(queue: PeerQueue) -> None:
    queue.busy(id_of(2), 0.0, 3.0)
    _succeed(queue, 2)


def _failed(queue: PeerQueue) -> None:
    queue.failed(id_of(2), 0.0)


def _gone(queue: PeerQueue) -> None:
    queue.update([record_of(number) for number in range(2)], 0.0)


def _elsewhere(queue: PeerQueue) -> None:
    queue.remove(id_of(2))


@pytest.mark.parametrize("happens", [_busy, _busy_and_answers, _failed, _gone, _elsewhere])
def test_an_idle_peer_that_cannot_be_asked_is_not(happens: Callable[[PeerQueue], None]) -> None:
    queue = PeerQueue(random.Random(0))
    queue.update([record_of(number) for number in range(3)], 0.0)
    _choose(queue)
    _succeed(queue, 2)
    happens(queue)
    assert 2 not in {_choose(queue) for _ in range(6)}


def test_an_idle_peer_that_is_excluded_is_not_asked() -> None:
    queue = PeerQueue(random.Random(0))
    queue.update([record_of(1), record_of(2)], 0.0)
    _choose(queue)
    _succeed(queue, 2)
    chosen = queue.choose(1, 0.0, exclude={id_of(2)}, prefer=())
    assert chosen is not None
    assert chosen.peer_id == id_of(1)


def test_an_idle_peer_that_one_microbatch_excludes_is_asked_with_the_next_one() -> None:
    queue = PeerQueue(random.Random(0))
    queue.update([record_of(number) for number in range(40)], 0.0)
    for number in [_choose(queue) for _ in range(400)]:
        _succeed(queue, number, queue_length=1)
    for number in (11, 7, 5):
        _succeed(queue, number)
    chosen = queue.choose(1, 0.0, exclude={id_of(5), id_of(7)}, prefer=())
    assert chosen is not None
    assert chosen.peer_id == id_of(11)
    assert [_choose(queue), _choose(queue)] == [5, 7], "whoever was heard last comes first, as before"


def test_what_was_idle_long_ago_waits_for_its_turn() -> None:
    queue = PeerQueue(random.Random(0))
    queue.update([record_of(number) for number in range(40)], 0.0)
    for number in [_choose(queue) for _ in range(400)]:
        _succeed(queue, number)
    _succeed(queue, 7)
    assert _choose(queue, 10.0) != 7
    _succeed(queue, 7, now=10.0)
    assert _choose(queue, 10.5) == 7
