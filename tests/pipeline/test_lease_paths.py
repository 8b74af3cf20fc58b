"""Leases in a run of several paths: a leader grants what begins at its block, of the paths that are wanted."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.config import RoundsConfig, RunConfig, StagesConfig
from swarm.types import Block
from tests.pipeline.leader import Leader

SYNCHRONOUS = RunConfig(
    stages=StagesConfig(num_stages=3, variants=(2, 1, 2)),
    rounds=RoundsConfig(setting="synchronous", round_samples=192),
)
DILOCO = dataclasses.replace(SYNCHRONOUS, rounds=RoundsConfig(setting="diloco", round_samples=192))
ENTRIES = Block(0), Block(0, 1)
SIZE = SYNCHRONOUS.microbatches_per_round


def test_with_diloco_a_new_leader_leaves_out_on_every_path_what_may_have_been_granted() -> None:
    leader = Leader(DILOCO, led_seconds=0.0)
    leader.highest = 1001
    granted = leader.give("a", 0, paths=[0, 1, 0, 1])
    assert min(granted) > 1001 + 4096
    assert Counter(map(DILOCO.path_of, granted)) == {0: 2, 1: 2}
    leader.highest = max(granted)
    assert min(leader.give("a", 0, paths=[0, 1])) > min(granted), "these are its own, and no reason to skip any more"


def test_a_round_is_not_all_granted_before_another_trainer_has_what_this_one_does_not_want() -> None:
    """Else later stages would begin replays while the stage still has new microbatches."""
    leader = Leader(SYNCHRONOUS)
    own = set(leader.round_of(path=0))
    leader.committed |= own
    assert not leader.ask("a", 0, paths=[0]).all_granted
    leader.committed |= set(leader.round_of(path=1))
    assert leader.ask("a", 0, paths=[0]).all_granted


@pytest.mark.parametrize("block", [Block(0), Block(1)])
def test_who_wants_other_paths_is_no_rival_for_what_was_lost(block: Block) -> None:
    """It gets none of these microbatches, so a trainer that has run one before would wait for it for ever."""
    leader = Leader(SYNCHRONOUS, block)
    leader.lost = {0}
    for _ in range(3):
        leader.ask("b", 0, paths=[1] * 99)
        grant = leader.ask("a", 0, paths=[0])
        assert list(grant.microbatches) == [0]
        leader.ask("a", 0, paths=[0], holding=[0])
        leader.ask("a", 0)
        leader.clock.advance(2.0)


# -- whatever is asked -------------------------------------------------------------------------------------------------

_WISHES = st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 1), max_size=6)), min_size=1, max_size=20)


@given(wishes=_WISHES, entry=st.integers(0, 1))
@settings(max_examples=100)
def test_with_diloco_every_path_is_granted_without_a_gap_or_a_repeat(
    wishes: list[tuple[str, list[int]]], entry: int
) -> None:
    block = ENTRIES[entry]
    own, leader, granted = DILOCO.paths_through(block), Leader(DILOCO, block), defaultdict[int, list[int]](list)
    for trainer, wish in wishes:
        paths = [own[number] for number in wish]
        microbatches = leader.give(trainer, 0, paths=paths)
        assert Counter(map(DILOCO.path_of, microbatches)) == Counter(paths)
        for microbatch in microbatches:
            granted[DILOCO.path_of(microbatch)].append(microbatch)
    for path, found in granted.items():
        assert found == [path + 4 * number for number in range(len(found))]


@given(
    chosen=st.lists(st.sets(st.integers(0, 1), min_size=1), min_size=1, max_size=3),
    turns=st.lists(st.integers(0, 2), max_size=30),
    most=st.integers(1, 5),
)
@settings(max_examples=60)
def test_a_round_is_handed_out_once_to_those_who_want_it(
    chosen: list[Collection[int]], turns: list[int], most: int
) -> None:
    """Trainers that want any paths ask in any order. Each microbatch of a path that somebody wants is granted, once,
    and none of any other."""
    leader, held = Leader(SYNCHRONOUS), [list[int]() for _ in chosen]
    leader.is_asked = False
    for turn in [*turns, *(number for _ in range(2 * SIZE) for number in range(len(chosen)))]:
        trainer = turn % len(chosen)
        leader.clock.advance(0.02)
        new = leader.give(f"{trainer}", 0, paths=sorted(chosen[trainer]) * most, holding=held[trainer])
        assert {*map(SYNCHRONOUS.path_of, new)} <= {*chosen[trainer]}
        assert max(Counter(map(SYNCHRONOUS.path_of, new)).values(), default=0) <= most
        assert not {*new} & {m for each in held for m in each}
        held[trainer] += new
        if held[trainer] and not new:
            leader.committed |= {held[trainer].pop(0)}
    everything = leader.committed | {m for each in held for m in each}
    assert everything == {m for m in leader.round_of() if SYNCHRONOUS.path_of(m) in set().union(*chosen)}
