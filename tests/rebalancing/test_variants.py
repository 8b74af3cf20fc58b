"""Peers of a run whose stages have variants: which blocks they choose, and to which they move."""

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.config import ModelConfig, RunConfig, StagesConfig
from swarm.rebalancing.decision import Policy, choose_span, decide
from swarm.rebalancing.judgement import Judgement, costs_of
from swarm.rebalancing.layout import Layout, Paths, Span, Worker, all_spans, layout_of, newcomers_before
from swarm.types import Block, ClaimRecord, ClaimState, PeerId, PeerRecord, PeerState, TrainerRecord
from tests.rebalancing.places import settle

Rooms = Mapping[PeerId, Sequence[Span]]


def at(*names: str) -> Span:
    return tuple(map(Block.parse, names))


def _paths(variants: Sequence[int]) -> dict[Span, float]:
    """All combinations."""
    return {tuple(map(Block, itertools.count(), path)): 1.0 for path in itertools.product(*map(range, variants))}


def _swarm(paths: Paths, *spans: Span, speed: float = 1.0) -> Layout:
    """Movable peers `0`, `1`, ... of these spans."""
    workers = [
        Worker(peer_id=PeerId(str(number)), span=span, speed=speed, movable=True) for number, span in enumerate(spans)
    ]
    return Layout(workers, dict.fromkeys(sorted({block for path in paths for block in path}), 1.0), paths)


def _come(paths: Paths, longest: int, num_peers: int) -> list[Span]:
    """What newcomers choose, one after another, with room for so many adjacent blocks."""
    chosen: list[Span] = []
    for _ in range(num_peers):
        span = choose_span(_swarm(paths, *chosen), all_spans(paths, longest))
        assert span is not None
        chosen.append(span)
    return chosen


def test_newcomers_make_one_path_whole_and_then_every_path() -> None:
    ones = [at(name) for name in ("0", "3", "1", "2", "1.1", "2.1", "1.2", "2.2")]
    assert _come(_paths([1, 3, 3, 1]), 1, 8) == ones
    assert _come(_paths([1, 3, 3, 1]), 4, 3) == [at("0", "1", "2", "3"), at("1.1", "2.1"), at("0", "1.2", "2.2")]
    listed = {at("0", "1", "2"): 1.0, at("0.1", "1", "2.1"): 1.0}
    assert _come(listed, 3, 2) == [at("0", "1", "2"), at("0.1", "1", "2.1")], "a span follows one path"


def test_a_block_has_the_share_of_the_paths_that_lead_through_it() -> None:
    counts = Counter(_come(_paths([1, 4, 1]), 1, 24))
    assert counts == {at("0"): 8, at("2"): 8} | {(Block(1, variant),): 2 for variant in range(4)}
    listed = {at("0", "1"): 1.0, at("0", "1.1"): 1.0, at("0", "1.2"): 1.0, at("0.1", "1.2"): 1.0}
    counts = Counter(_come(listed, 1, 16))
    assert counts == {at("0"): 6, at("0.1"): 2, at("1"): 2, at("1.1"): 2, at("1.2"): 4}


def test_a_peer_of_a_path_counts_with_what_it_manages_whatever_its_blocks_share() -> None:
    """It announces the samples that it manages where each passes all of its blocks."""
    paths = _paths([1, 4, 1])
    costs = dict.fromkeys(sorted({block for path in paths for block in path}), 1.0)

    def record(peer: int, name: str, rate: float) -> PeerRecord:
        block = Block.parse(name)
        return PeerRecord(
            peer_id=f"{peer:040x}", announced_at=100.0, stage=block.stage, variant=block.variant,
            endpoint="192.0.2.1:1", state=PeerState.SERVING, samples_per_second=rate,
        )  # fmt: skip

    records = [record(1, "0", 2.0), record(1, "1.1", 2.0), record(2, "1.2", 3.0)]
    # A peer of all variants gets a quarter of what it computes at each.
    records += [record(3, name, 1.0) for name in ("1", "1.1", "1.2", "1.3")]
    now = layout_of({block: [one for one in records if one.block == block] for block in costs}, [], costs, paths)
    assert [now.workers[PeerId(f"{peer:040x}")].speed for peer in (1, 2, 3)] == [4.0, 3.0, 4.0]
    assert now.throughput[Block(1, 2)] == 3.0 * 4 + 4.0


def test_a_gap_is_filled_by_a_peer_that_can_be_spared_and_others_stay() -> None:
    paths = _paths([1, 2])
    now = _swarm(paths, at("0"), at("0"), at("1"))
    assert decide(now, PeerId("0")) == at("1.1")
    assert decide(now, PeerId("2")) is None
    both = _swarm(paths, at("0", "1"), at("0", "1"))
    assert decide(both, PeerId("0"), spans=all_spans(paths, 2)[-2:]) == at("0", "1.1")


def test_a_path_that_nobody_can_make_whole_holds_up_nothing() -> None:
    """Peers of the others move among these as if it were not there."""
    paths = _paths([1, 2, 1])
    spans = [at("0")] * 6 + [at("1")] + [at("2")] * 2
    lost = _swarm(paths, *spans)
    assert decide(lost, PeerId("0"), closed=at("1.1")) == at("1")
    assert choose_span(lost, all_spans(paths, 1), closed=at("1.1")) == at("1")
    # What is computed on a path that stands still is no loss.
    idle = _swarm(_paths([2, 1]), at("0"), at("0.1"), at("0.1"), at("0.1"))
    assert decide(idle, PeerId("1"), Policy(stay_seconds=600.0)) == at("1")
    # Of two lone peers none can be spared, and the third stays where it is strongest.
    both = {at("0", "1"): 1.0, at("0.1", "1.1"): 1.0}
    assert decide(_swarm(both, at("0"), at("1"), at("0.1")), PeerId("0")) is None


def test_paths_that_trainers_feed_come_first() -> None:
    paths = _paths([1, 2])
    config = RunConfig(model=ModelConfig(num_layers=2), stages=StagesConfig(num_stages=2, variants=(1, 2)))
    judgement = Judgement(own_id=PeerId("me"), costs=costs_of(config), paths=paths)

    def first(*trainers: Sequence[int]) -> Span | None:
        judgement.see([TrainerRecord(peer_id="a" * 40, announced_at=1.0, paths=tuple(each)) for each in trainers])
        return judgement.first_choice({}, [claims["0"], claims["2"]], ())

    claims = {
        peer: ClaimRecord(
            peer_id=peer * 40, announced_at=1.0, claimed_at=1.0, state=ClaimState.CONFIRMED,
            **ClaimRecord.fields_of(at("0")),
        )
        for peer in ("0", "2")
    }  # fmt: skip
    assert first() == at("1")
    assert first([1]) == at("1.1")
    assert first() == at("1.1"), "a trainer that has ended does not send peers back"
    assert first([1], []) == at("1"), "one that names no paths feeds all"


@st.composite
def swarms(draw: st.DrawFn) -> tuple[Layout, Rooms]:
    """Any swarm of up to 10 peers and 4 stages with up to 3 variants each, all paths or some; each peer has room for so
    many adjacent blocks of any path."""
    variants = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    every = list(_paths(variants))
    chosen = draw(st.lists(st.sampled_from(every), min_size=1, max_size=6, unique=True))
    paths = dict.fromkeys(sorted(chosen) if draw(st.booleans()) else every, 1.0)
    blocks = sorted({block for path in paths for block in path})
    costs = {block: draw(st.floats(0.2, 3.0)) for block in blocks}
    rooms, workers = dict[PeerId, Sequence[Span]](), list[Worker]()
    for number in range(draw(st.integers(1, 10))):
        peer = PeerId(str(number))
        rooms[peer] = all_spans(paths, draw(st.integers(1, len(variants))))
        span = draw(st.sampled_from(rooms[peer]))
        speed = draw(st.one_of(st.floats(0.05, 20.0), st.just(0.0)))
        missing = span[:1] if draw(st.integers(0, 9)) == 0 else ()
        movable = draw(st.integers(0, 4)) > 0
        workers.append(Worker(peer_id=peer, span=span, speed=speed, missing=missing, movable=movable))
    return Layout(workers, costs, paths), rooms


def _whole(layout: Layout) -> set[Span]:
    """The paths of which every block has a peer."""
    return {path for path in layout.paths if all(layout.num_workers[block] for block in path)}


@settings(max_examples=60)
@given(swarms(), st.integers(0, 2**32))
def test_it_settles_and_no_move_empties_a_block_or_lowers_what_the_paths_manage(
    swarm: tuple[Layout, Rooms], seed: int
) -> None:
    now, rooms = swarm
    for peer_id, target, after in settle(now, random.Random(seed), limit=4 * len(now.workers), spans=rooms):
        worker = now.workers[peer_id]
        assert target in rooms[peer_id]
        assert {*worker.span} - {*target} <= {block for block, number in after.num_serving.items() if number}
        assert _whole(now) <= _whole(after)
        # With no gap to be filled it is as without variants.
        if _whole(now) == {*now.paths}:
            assert after.pipeline_throughput >= now.pipeline_throughput * (1 - 1e-9)
        now = after


@settings(max_examples=40)
@given(swarms(), st.integers(0, 2**32))
def test_equal_peers_of_single_blocks_leave_no_path_broken_that_one_move_makes_whole(
    swarm: tuple[Layout, Rooms], seed: int
) -> None:
    now, _ = swarm
    workers = [Worker(peer_id=one.peer_id, span=one.span[:1], speed=1.0, movable=True) for one in now.workers.values()]
    now = Layout(workers, dict.fromkeys(now.costs, 1.0), now.paths)
    moves = settle(now, random.Random(seed))
    now = moves[-1][2] if moves else now
    if any(number > 1 for number in now.num_workers.values()):
        lacks = [sum(not now.num_workers[block] for block in path) for path in now.paths]
        assert 1 not in lacks


@settings(max_examples=60)
@given(swarms(), st.integers(1, 12), st.integers(0, 2**32))
def test_newcomers_that_claim_at_once_take_no_block_twice_while_another_is_empty(
    swarm: tuple[Layout, Rooms], num_peers: int, seed: int
) -> None:
    """Each sees all claims, of which it counts those that come before its own."""
    layout, _ = swarm
    spans, rng = all_spans(layout.paths, 1), random.Random(seed)
    claims = [
        ClaimRecord(
            peer_id=f"{number:040x}", announced_at=100.0, state=ClaimState.PENDING,
            claimed_at=100.0 + rng.randrange(3), **ClaimRecord.fields_of(spans[0]),
        )
        for number in range(num_peers)
    ]  # fmt: skip
    chosen = Counter[Span | None]()
    for own in rng.sample(claims, num_peers):
        now = layout_of({}, [], layout.costs, layout.paths, own=own)
        chosen[choose_span(now, spans, num_before=len(newcomers_before(claims, own, now)))] += 1
    assert len(chosen) == min(num_peers, len(spans))


@pytest.mark.parametrize("span", [at("0", "1"), at("0.1", "1.1"), at("1.1"), at("0", "1.2"), at("1", "1.1", "2")])
def test_a_claim_names_all_blocks(span: Span) -> None:
    claim = ClaimRecord(
        peer_id="a" * 40, announced_at=1.0, claimed_at=1.0, state=ClaimState.PENDING, **ClaimRecord.fields_of(span),
        **ClaimRecord.fields_of(span[::-1], before=True),
    )  # fmt: skip
    read = ClaimRecord.model_validate_json(claim.model_dump_json())
    assert read.span == span
    assert read.from_span == span[::-1]
    assert (read.stage, read.variant) == span[0], "what earlier releases read"
