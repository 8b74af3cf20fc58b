"""Which peer moves to which stage: examples."""

import random
import time
from typing import Any

import pytest

from swarm.rebalancing.decision import Policy, choose_span, decide
from swarm.rebalancing.layout import Layout, Span, Worker, all_spans
from swarm.types import Block, PeerId
from tests.rebalancing.places import by_block, layout, settle, span

FIRST, SECOND, THIRD = PeerId("0.0"), PeerId("0.1"), PeerId("0.2")


def test_a_stage_that_lost_two_of_three_gets_one() -> None:
    now = layout([1, 1, 1], [1], [1, 1, 1])
    assert decide(now, FIRST) == span(1)
    assert decide(now, PeerId("2.1")) == span(1)
    assert decide(now, PeerId("1.0")) is None
    moves = settle(now, random.Random(1))
    assert len(moves) == 1
    assert moves[0][2].pipeline_throughput == 2


def test_a_move_that_raises_nothing_by_itself_is_made_if_the_next_one_does() -> None:
    assert [len(row) for row in _rows(settle(layout([1] * 4, [1] * 4, [1] * 2, [1] * 2), random.Random(1)))] == [3] * 4
    now = layout([1] * 4, [1] * 3, [1] * 2, [1] * 2)
    assert settle(now, random.Random(1)) == [], "one of the two weakest would stay as it is: nothing is won"


def test_the_last_serving_peer_stays() -> None:
    assert decide(layout([9], [1]), FIRST) is None
    workers = [
        Worker(peer_id=FIRST, span=span(0), speed=9, movable=True),
        Worker(peer_id=SECOND, span=span(0), speed=9, missing={Block(0)}),
        Worker(peer_id=THIRD, span=span(1), speed=1, movable=True),
    ]
    assert decide(Layout(workers, by_block([1, 1])), FIRST) is None, "the other one has not arrived"


def test_the_best_fitting_peer_goes_and_others_only_if_it_does_not() -> None:
    now = layout([6, 1, 1, 1], [4])
    assert decide(now, FIRST) is None, "its stage would be the weakest then"
    assert decide(now, SECOND) == span(1)
    now = layout([3, 1.5, 1.5], [2])
    assert decide(now, SECOND) == span(1)
    assert decide(now, FIRST) is None
    assert decide(now, FIRST, waited=True) == span(1)


@pytest.mark.parametrize("errors", [(1.0, 1.0, 1.0), (0.99, 1.0, 1.02), (0.955, 0.995, 1.0075)])
def test_errors_do_not_make_a_move_look_needless(errors: tuple[float, float, float]) -> None:
    """With a second move the plan would gain a little more, and the first move would seem to matter little."""
    now = layout(*([error] * count for error, count in zip(errors, (2, 4, 4), strict=True)))
    movers = [peer for peer in now.workers if decide(now, peer, Policy(stay_seconds=20_000.0), waited=True) is not None]
    assert movers


def test_a_move_has_to_pay_for_itself() -> None:
    now = layout([1, 1, 1], [1])
    assert decide(now, FIRST, Policy(move_seconds=60, stay_seconds=130)) == span(1)
    assert decide(now, FIRST, Policy(move_seconds=60, stay_seconds=110)) is None
    crowd = layout([1] * 104, [1] * 97)
    assert decide(crowd, FIRST, Policy(hysteresis=0.1)) == span(1)
    assert decide(crowd, FIRST, Policy(hysteresis=0.3, enough=5.0)) is None
    assert decide(crowd, FIRST, Policy(hysteresis=0.3)) == span(1), "half a peer's worth is enough"


def test_costs_tell_what_a_peer_would_manage_elsewhere() -> None:
    # The second stage is three times as much work, so with equally many peers it is the weaker one.
    moves = settle(layout([1] * 4, [1] * 4, costs=(0.5, 1.5)), random.Random(1))
    assert [len(row) for row in _rows(moves)] == [3, 5]
    assert settle(layout([1] * 4, [1] * 4), random.Random(1)) == []


def test_what_a_peer_measured_there_itself_counts_more() -> None:
    now = layout([1, 1, 1], [1])
    assert decide(now, FIRST, own_rates={Block(1): 0.05}) is None
    assert decide(now, FIRST, own_rates={Block(0): 0.05}) == span(1), (
        "of the stage where it is, the announced figure is newer"
    )


def test_a_stage_that_cannot_be_entered() -> None:
    now = layout([1, 1, 1], [])
    assert decide(now, FIRST) == span(1)
    assert decide(now, FIRST, closed={Block(1)}) is None
    now = layout([1] * 6, [1], [1, 1])
    assert decide(now, FIRST) == decide(now, FIRST, closed={Block(2)}) == span(1), "that move pays by itself"


def test_newcomers_fill_the_weakest_stage_one_after_another() -> None:
    assert _choice(Layout([], by_block([1, 1, 1]))) == span(0)
    now = layout([1], [], [1])
    assert [_choice(now, num_before=number) for number in range(4)] == [*map(span, (1, 0, 1, 2))]
    assert _choice(now, closed={Block(1)}) == span(0)
    assert _choice(now, closed=set(now.costs)) is None
    assert _choice(layout([1], [3], [1, 1])) == span(0)


def test_a_decision_among_400_peers_is_cheap() -> None:
    balanced = layout(*[[1.0] * 100] * 4)
    torn = layout([1.0] * 150, [1.0] * 150, [1.0] * 60, [1.0] * 40)

    def seconds(now: Layout) -> float:
        start = time.thread_time()
        for _ in range(10):
            decide(now, FIRST)
        return (time.thread_time() - start) / 10

    assert min(seconds(balanced) for _ in range(5)) < 0.002
    assert min(seconds(torn) for _ in range(5)) < 0.1


def _rows(moves: list[tuple[PeerId, Span, Layout]]) -> list[list[PeerId]]:
    last = moves[-1][2]
    return [[p for p, worker in last.workers.items() if block in worker.span] for block in last.costs]


def _choice(now: Layout, **more: Any) -> Span | None:
    """Where a newcomer goes that has room for one block."""
    return choose_span(now, all_spans(now.paths, 1), **more)
