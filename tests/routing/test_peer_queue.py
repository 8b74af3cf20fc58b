"""One stage's queue: shares, newcomers, bans, and what a choice costs."""

import heapq
import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.errors import LONGEST_BUSY_SECONDS
from swarm.routing import peer_queue
from swarm.routing.bans import BASE_BAN_SECONDS, LEAST_BAN_SHARE, LONGEST_BAN_SECONDS
from swarm.routing.peer_queue import MAX_SLOWNESS, PeerQueue
from swarm.routing.throughput import Observation
from swarm.types import PeerRecord
from tests.routing.records import id_of, record_of


def _queue(*records: PeerRecord) -> PeerQueue:
    queue = PeerQueue(random.Random(0))
    queue.update(records, 0.0)
    return queue


def _choose(queue: PeerQueue, now: float = 0.0, num_samples: int = 1) -> int:
    record = queue.choose(num_samples, now, exclude=(), prefer=None)
    assert record is not None
    return int(record.peer_id, 16)


def _succeed(queue: PeerQueue, number: int, seconds: float, now: float = 0.0, queue_length: int = 0) -> None:
    queue.succeeded(
        id_of(number),
        now,
        Observation(num_samples=1, busy_seconds=seconds, link_seconds=0.0, queue_length=queue_length),
    )


def _serve(queue: PeerQueue, seconds: dict[int, float], num_choices: int, in_flight: int = 1) -> Counter[int]:
    """Choose `in_flight` at a time, then let them all reply; the clock stands still."""
    counts: Counter[int] = Counter()
    for _ in range(num_choices // in_flight):
        chosen = [_choose(queue) for _ in range(in_flight)]
        for number in chosen:
            _succeed(queue, number, seconds[number])
        counts.update(chosen)
    return counts


@pytest.mark.parametrize("in_flight", [1, 8])
@pytest.mark.parametrize("announced", [(1.0, 2.0, 3.0), (0.0, 0.0, 0.0), (1000.0, 1.0, 0.01)])
def test_shares_follow_throughput_whatever_was_announced(announced: tuple[float, ...], in_flight: int) -> None:
    queue = _queue(*(record_of(number, rate) for number, rate in enumerate(announced, 1)))
    seconds = {1: 1.0, 2: 1 / 2, 3: 1 / 3}
    _serve(queue, seconds, 400, in_flight)
    counts = _serve(queue, seconds, 4800, in_flight)
    for number in (1, 2, 3):
        assert counts[number] / 4800 == pytest.approx(number / 6, rel=0.05)


def test_shares_hold_while_the_queue_is_mostly_idle() -> None:
    """For one of many trainers a stage seems idle, because this trainer sends work only now and then."""
    queue = _queue(*(record_of(number, float(number)) for number in (1, 2, 3)))
    counts = Counter(_choose(queue, now=100.0 * step) for step in range(3000))
    for number in (1, 2, 3):
        assert counts[number] / 3000 == pytest.approx(number / 6, rel=0.05)


def test_a_long_queue_costs_share() -> None:
    queue = _queue(record_of(1), record_of(2))
    counts: Counter[int] = Counter()
    for _ in range(2000):
        number = _choose(queue)
        _succeed(queue, number, 1.0, queue_length=2 if number == 2 else 0)
        counts[number] += 1
    assert counts[1] / counts[2] == pytest.approx(3.0, rel=0.1)


def test_a_newcomer_gets_its_share_and_no_more() -> None:
    queue = PeerQueue(random.Random(0))
    seconds = {number: 1.0 for number in range(5)}
    queue.update([record_of(number) for number in range(4)], 0.0)
    _serve(queue, seconds, 1000)
    queue.update([record_of(number) for number in range(5)], 0.0)
    # There are a dozen choices before peer 4's first reply, and many after.
    assert 1 <= Counter(_choose(queue) for _ in range(12))[4] <= 4
    assert _serve(queue, seconds, 1000)[4] / 1000 == pytest.approx(0.2, rel=0.1)


def test_a_boast_draws_no_herd() -> None:
    queue = _queue(*(record_of(number) for number in range(8)))
    _serve(queue, {number: 1.0 for number in range(8)}, 100)
    queue.update([*(record_of(number) for number in range(8)), record_of(8, 1e9)], 0.0)
    boaster = Counter(_choose(queue) for _ in range(240))[8]
    # Four times a peer of the typical time, which the boast itself has shortened by 19 %.
    assert boaster / 240 == pytest.approx(4.9 / 12.9, abs=0.03)


def test_a_recovered_peer_gets_its_share_back() -> None:
    queue = _queue(record_of(1), record_of(2), record_of(3))
    slow = _serve(queue, {1: 1.0, 2: 1.0, 3: 1000.0}, 2000)
    assert 0 < slow[3] / 2000 < 0.03
    recovered = {1: 1.0, 2: 1.0, 3: 1.0}
    _serve(queue, recovered, int(6 * MAX_SLOWNESS * 2))
    assert _serve(queue, recovered, 1500)[3] / 1500 == pytest.approx(1 / 3, rel=0.05)


def test_absurd_replies_do_not_spoil_the_others() -> None:
    queue = _queue(*(record_of(number) for number in range(4)))
    counts = _serve(queue, {0: 1.0, 1: 1.0, 2: 1.0, 3: math.nan}, 3000)
    assert 0 < counts[3] < 100
    for number in range(3):
        assert counts[number] == pytest.approx((3000 - counts[3]) / 3, rel=0.05)


def test_bans_double_and_are_capped() -> None:
    queue = _queue(record_of(1))
    now, waits = 0.0, []
    for _ in range(9):
        queue.failed(id_of(1), now)
        wait = queue.next_available_seconds(now)
        assert wait is not None
        assert queue.choose(1, now + 0.99 * wait, exclude=(), prefer=id_of(1)) is None
        waits.append(wait)
        now += wait
    assert waits == pytest.approx([5, 10, 20, 40, 80, 160, 300, 300, LONGEST_BAN_SECONDS])
    assert _choose(queue, now) == 1


def test_only_a_later_announcement_shortens_a_ban() -> None:
    queue = _queue(record_of(1, announced_at=10.0))
    queue.failed(id_of(1), 0.0)
    queue.failed(id_of(1), 5.0)
    queue.failed(id_of(1), 15.0)  # until 35
    queue.update([record_of(1, announced_at=10.0)], 16.0)
    assert queue.next_available_seconds(16.0) == pytest.approx(19.0)
    queue.update([record_of(1, announced_at=11.0)], 17.0)
    assert queue.next_available_seconds(17.0) == pytest.approx(3.0)
    queue.update([record_of(1, announced_at=12.0)], 21.0)
    assert _choose(queue, 21.0) == 1
    queue.failed(id_of(1), 22.0)
    assert queue.next_available_seconds(22.0) == pytest.approx(40.0), "the back-off itself goes on"


def test_who_was_gone_and_announces_himself_is_back_at_once() -> None:
    queue = _queue(record_of(1, announced_at=10.0))
    queue.failed(id_of(1), 0.0, is_gone=True)
    queue.update([record_of(1, announced_at=10.0)], 1.0)
    assert queue.choose(1, 1.0, exclude=(), prefer=None) is None, "it announced that before it went"
    queue.update([record_of(1, announced_at=11.0)], 2.0)
    assert _choose(queue, 2.0) == 1


def test_who_did_not_answer_and_does_now_is_back_before_the_ban_would_end() -> None:
    queue = _queue(record_of(1), record_of(2))
    queue.failed(id_of(1), 0.0, is_unreachable=True)
    queue.failed(id_of(2), 0.0)
    assert [record.peer_id for record in queue.unreachable(0.5)] == [id_of(1)], "the other one answered, and was wrong"
    queue.answered(id_of(1), 0.5)
    assert queue.choose(1, 0.5, exclude=(), prefer=None) is None, "a moment later it may be gone again"
    for number in (1, 2):
        queue.answered(id_of(number), LEAST_BAN_SHARE * BASE_BAN_SECONDS)
    assert queue.unreachable(1.0) == []
    assert _choose(queue, 1.0) == _choose(queue, 1.0) == 1
    queue.failed(id_of(1), 2.0, is_unreachable=True)
    assert queue.next_available_seconds(2.0) == pytest.approx(3.0), "of the other one"
    queue.answered(id_of(1), 3.9)
    assert queue.unreachable(3.9), "the back-off goes on: a fifth of 10 s"
    queue.answered(id_of(1), 4.0)
    assert not queue.unreachable(4.0)


def test_who_still_does_not_answer_stays_banned() -> None:
    queue = _queue(record_of(1, announced_at=10.0), record_of(2))
    queue.failed(id_of(1), 0.0, is_unreachable=True)
    queue.failed(id_of(2), 0.0)
    queue.update([record_of(1, announced_at=14.0), record_of(2)], 4.0)
    for now in (4.5, 5.0, 5.5):
        for number in (1, 2):
            queue.unanswered(id_of(number), now, 1.0)
    assert [_choose(queue, 6.0) for _ in range(3)] == [2, 2, 2], "it is heard of, but does not answer"
    queue.unanswered(id_of(1), 7.0, 1.0)
    assert {_choose(queue, 7.0) for _ in range(10)} == {1, 2}, "nobody asks it any more, so that a ban ends by itself"


def test_busy_is_no_ban() -> None:
    queue = _queue(record_of(1), record_of(2))
    queue.busy(id_of(1), 0.0, 3.0)
    assert {_choose(queue, 1.0) for _ in range(10)} == {2}
    hinted = queue.choose(1, 1.0, exclude=(), prefer=id_of(1))
    assert hinted is not None
    assert hinted.peer_id == id_of(1)
    assert {_choose(queue, 3.0) for _ in range(10)} == {1, 2}
    assert queue.banned(1.0) == set()


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -5.0, 1e300])
def test_a_senseless_retry_after_is_bounded(nonsense: float) -> None:
    queue = _queue(record_of(1))
    queue.busy(id_of(1), 0.0, nonsense)
    wait = queue.next_available_seconds(0.0)
    assert wait is not None
    assert 0 <= wait <= LONGEST_BUSY_SECONDS


def test_a_new_endpoint_starts_from_its_own_announcement() -> None:
    queue = _queue(record_of(1), record_of(2))
    _serve(queue, {1: 1.0, 2: 20.0}, 200)
    before = queue.expected_seconds(id_of(2), 1)
    assert before is not None
    assert before > 10.0
    queue.update([record_of(1), record_of(2, 0.5, announced_at=1.0, endpoint="elsewhere:1")], 0.0)
    assert queue.expected_seconds(id_of(2), 1) == pytest.approx(2.0)
    moved = queue.record(id_of(2))
    assert moved is not None
    assert moved.endpoint == "elsewhere:1"


def test_a_choice_costs_as_many_heap_operations_among_ten_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons grow like the logarithm of the peers, as every heap operation does, and there is no other loop."""
    num_operations = 0

    def counted(name: str) -> Any:
        def operation(*args: Any) -> Any:
            nonlocal num_operations
            num_operations += 1
            return getattr(heapq, name)(*args)

        return operation

    names = ("heappush", "heappop", "heapreplace")
    monkeypatch.setattr(peer_queue, "heapq", SimpleNamespace(**{name: counted(name) for name in names}))
    costs = []
    for num_peers in (10, 10_000):
        queue = PeerQueue(random.Random(0))
        queue.update([record_of(number, 1.0 + number % 7) for number in range(num_peers)], 0.0)
        _choose(queue)  # This choice takes all peers into the queue.
        num_operations = 0
        for step in range(1000):
            number = _choose(queue, float(step))
            queue.choose(1, float(step), exclude=(), prefer=id_of(number))
            if step % 10 == 0:
                queue.busy(id_of(number), float(step), 2.0)
        costs.append(num_operations / 1000)
    assert max(costs) < 4.0
