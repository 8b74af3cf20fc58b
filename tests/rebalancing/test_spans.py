"""Peers with room for several stages: which span each chooses, and to which it moves."""

import itertools
import random
import statistics
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.rebalancing.decision import choose_span, decide
from swarm.rebalancing.judgement import AVOID_SECONDS, Judgement
from swarm.rebalancing.layout import Layout, Span, Worker, all_spans
from swarm.types import Block, PeerId
from tests.rebalancing.places import by_block, settle, span

Rooms = Mapping[PeerId, Sequence[Span]]
A, B, C = map(PeerId, "abc")


def _swarm(*peers: tuple[PeerId, Span, float], num_stages: int = 3) -> Layout:
    workers = [Worker(peer_id=peer, span=at, speed=speed, movable=True) for peer, at, speed in peers]
    return Layout(workers, by_block([1.0] * num_stages))


def _spans(num_stages: int, longest: int) -> list[Span]:
    return all_spans([tuple(map(Block, range(num_stages)))], longest)


def test_a_newcomer_takes_what_nobody_serves_and_of_that_what_fits() -> None:
    alone = _swarm((A, span(0), 1.0))
    assert choose_span(alone, _spans(3, 3)) == span(1, 2)
    assert choose_span(alone, _spans(3, 1)) == span(1)
    assert choose_span(alone, [span(0, 1)]) == span(0, 1)
    assert choose_span(alone, _spans(3, 3), closed={Block(2)}) == span(1)
    assert choose_span(alone, []) is None


def test_the_first_peer_takes_all_that_fits_from_the_first_stage_on() -> None:
    empty = Layout([], by_block([1.0] * 4))
    assert choose_span(empty, _spans(4, 4)) == span(0, 3)
    assert choose_span(empty, _spans(4, 2)) == span(0, 1)
    assert choose_span(empty, _spans(4, 2), num_before=1) == span(2, 3)


def test_where_all_stages_are_equally_strong_a_newcomer_takes_all_and_helps_the_pipeline() -> None:
    balanced = _swarm((A, span(0), 1.0), (B, span(1), 1.0), (C, span(2), 1.0))
    assert choose_span(balanced, _spans(3, 3)) == span(0, 2)
    assert choose_span(_swarm((A, span(0, 2), 3.0), (B, span(0, 1), 8.0)), _spans(3, 3)) == span(2)


def test_a_peer_takes_over_what_another_left_beside_its_own() -> None:
    now = _swarm((A, span(1, 2), 1.0), (B, span(0, 2), 0.3))
    assert decide(now, A, spans=_spans(3, 3)) == span(0, 2)
    assert decide(now, A, spans=_spans(3, 2)) is None, "stage 2 would be as weak as stage 0 is"
    assert decide(now, A, spans=_spans(3, 3), closed={Block(0)}) is None
    assert decide(now, A, spans=_spans(3, 3), closed={span(0, 2)}) is None


def test_a_peer_gives_up_what_another_does_for_it() -> None:
    now = _swarm((A, span(0, 1), 1.0), (B, span(1), 1.0))
    assert decide(_swarm((A, span(0, 1), 1.0), (B, span(1), 1.0), num_stages=2), A, spans=_spans(2, 2)) == span(0)
    assert decide(now, A, spans=_spans(3, 2)) is None, "stage 2 is empty, and it has no room for it beside stage 0"


def test_a_span_to_which_a_peer_could_not_narrow_is_avoided_for_a_while() -> None:
    judgement = Judgement(own_id=A, costs=by_block([1.0] * 3), spans=_spans(3, 3))
    judgement.gave_up(span(1, 2), 0.0, before=span(0, 1))
    judgement.gave_up(span(0), 0.0, before=span(0, 1))
    assert judgement.avoided(1.0) == {Block(2), span(0)}
    judgement.arrived(span(2), move_seconds=None)
    assert judgement.avoided(1.0) == {span(0)}
    assert judgement.avoided(AVOID_SECONDS + 1.0) == set()


@st.composite
def swarms(draw: st.DrawFn) -> tuple[Layout, Rooms]:
    """Any swarm of up to 12 peers and 5 stages, each peer with room for so many adjacent stages, at any of them."""
    num_stages = draw(st.integers(2, 5))
    costs = by_block(draw(st.lists(st.floats(0.2, 3.0), min_size=num_stages, max_size=num_stages)))
    rooms, workers = dict[PeerId, Sequence[Span]](), list[Worker]()
    for number in range(draw(st.integers(1, 12))):
        peer = PeerId(str(number))
        rooms[peer] = _spans(num_stages, draw(st.integers(1, num_stages)))
        at = draw(st.sampled_from(rooms[peer]))
        speed = draw(st.one_of(st.floats(0.05, 20.0), st.just(0.0)))
        missing = at[:1] if draw(st.integers(0, 9)) == 0 else ()
        movable = draw(st.integers(0, 4)) > 0
        workers.append(Worker(peer_id=peer, span=at, speed=speed, missing=missing, movable=movable))
    return Layout(workers, costs), rooms


@settings(max_examples=100)
@given(swarms(), st.integers(0, 2**32))
def test_it_settles_and_no_move_lowers_the_throughput_empties_a_stage_or_goes_where_there_is_no_room(
    swarm: tuple[Layout, Rooms], seed: int
) -> None:
    now, rooms = swarm
    for peer_id, target, after in settle(now, random.Random(seed), limit=4 * len(now.workers), spans=rooms):
        worker = now.workers[peer_id]
        least = now.pipeline_throughput * (1 - 1e-9)
        assert target in rooms[peer_id]
        assert after.pipeline_throughput >= least
        for block in {*worker.span} - {*target}:
            # That holds also while the peer is on its way, when it counts neither here nor at its new blocks.
            assert now.throughput[block] - now.speed(worker) / now.cost(worker.span) >= least
            assert after.num_serving[block] >= 1
        now = after


def _best(speeds: Sequence[float], costs: Mapping[Block, float], rooms: Sequence[Sequence[Span]]) -> float:
    """The throughput of the best of all spans that these peers could have together."""
    best = 0.0
    for spans in itertools.product(*rooms):
        workers = [Worker(peer_id=PeerId(str(n)), span=at, speed=speeds[n]) for n, at in enumerate(spans)]
        best = max(best, Layout(workers, costs).pipeline_throughput)
    return best


def _share(num_stages: int, longest: int, rng: random.Random) -> float:
    """Peers come one after another, and move until all stay. Their throughput as a share of the best possible."""
    costs, speeds = by_block([1.0] * num_stages), [rng.choice([1.0, 4.0, 16.0]) for _ in range(rng.randint(2, 4))]
    spans, workers = _spans(num_stages, longest), list[Worker]()
    for number, speed in enumerate(speeds):
        peer, at = PeerId(str(number)), choose_span(Layout(workers, costs), spans)
        assert at is not None
        workers.append(Worker(peer_id=peer, span=at, speed=speed, movable=True))
        rooms = {worker.peer_id: spans for worker in workers}
        for _, _, after in settle(Layout(workers, costs), rng, spans=rooms):
            workers = list(after.workers.values())
    best = _best(speeds, costs, [spans] * len(speeds))
    return Layout(workers, costs).pipeline_throughput / best if best else 1.0


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_with_room_for_all_stages_peers_of_any_capacity_are_all_used(num_stages: int) -> None:
    assert all(_share(num_stages, num_stages, random.Random(seed)) > 0.999 for seed in range(10))


def test_with_room_for_half_of_the_stages_hardly_anything_is_lost_against_all_that_can_be_tried() -> None:
    shares = [_share(num_stages, 2, random.Random(seed)) for seed in range(20) for num_stages in (3, 4)]
    assert statistics.fmean(shares) > 0.95
    assert min(shares) > 0.79
