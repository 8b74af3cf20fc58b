"""Rounds whose weights are held for texts: which round a text gets, and how many are held for how long."""

import asyncio
from contextlib import ExitStack

import pytest
import torch

from swarm.errors import Overloaded, RoundMismatch
from swarm.rpc.callers import Caller
from swarm.stage.held_rounds import LINGER_SECONDS, MAX_ROUNDS_EACH, MAX_ROUNDS_OF_USER, HeldRounds
from tests.support.virtual_time import in_virtual_time

ONE, OTHER = Caller("one"), Caller("other")


class Anchors:
    """A stage that keeps the anchors of its round and the one before."""

    def __init__(self) -> None:
        self.present = 0
        self.kept = {0: {"weight": torch.zeros(1)}}
        self.rounds = HeldRounds(lambda number: self.kept.get(number), lambda: self.present, MAX_ROUNDS_OF_USER)

    def commit(self) -> None:
        self.present += 1
        self.kept[self.present] = {"weight": torch.full((1,), float(self.present))}
        self.kept.pop(self.present - 2, None)


async def test_weights_are_held_that_training_has_left_behind() -> None:
    stage = Anchors()
    with stage.rounds.held(0, ONE) as held:
        for _ in range(3):
            stage.commit()
        with stage.rounds.held(0, ONE) as again:
            assert again is held
            assert float(held.on(torch.device("cpu"))["weight"]) == 0.0
        with pytest.raises(RoundMismatch, match="round 1 is not kept, this peer is at 3"), stage.rounds.held(1, ONE):
            pass


async def test_a_text_takes_a_recent_round_that_is_held_already() -> None:
    stage = Anchors()
    with stage.rounds.held(0, ONE):
        assert stage.rounds.choose(0, ONE) == 0
        stage.commit()
        assert stage.rounds.choose(1, ONE) == 0
        stage.commit()
        assert stage.rounds.choose(2, ONE) == 2


async def test_where_stages_are_rounds_apart_the_nearest_round_is_taken_that_is_here() -> None:
    stage = Anchors()
    assert stage.rounds.nearest(7) == 0
    with stage.rounds.held(0, ONE):
        for _ in range(5):
            stage.commit()
        assert [stage.rounds.nearest(number) for number in (0, 1, 3, 4, 5, 9)] == [0, 0, 4, 4, 5, 5]
    del stage.kept[4]
    assert stage.rounds.nearest(4) == 5, "a newcomer lacks the round before"


async def test_no_caller_takes_all_of_them_or_decides_what_others_get() -> None:
    stage = Anchors()
    with ExitStack() as stack:
        for number in range(MAX_ROUNDS_OF_USER):
            stack.enter_context(stage.rounds.held(number, ONE))
            stage.commit()
        stage.commit()
        newest = stage.present
        with pytest.raises(Overloaded, match="this caller uses 2 other rounds already"), stage.rounds.held(newest, ONE):
            pass
        # Its further texts take one of its own rounds, and another caller's the newest.
        assert stage.rounds.choose(newest, ONE) == MAX_ROUNDS_OF_USER - 1
        assert stage.rounds.choose(newest, OTHER) == newest
        with stage.rounds.held(newest, OTHER):
            stage.commit()
            stage.commit()
            # The peer that carries all of these is one caller at the next stage.
            assert len(stage.rounds) == MAX_ROUNDS_EACH
            assert stage.rounds.choose(stage.present, Caller("third")) == newest


@in_virtual_time
async def test_they_are_held_for_a_while_after_their_last_text() -> None:
    stage = Anchors()
    with stage.rounds.held(0, ONE):
        stage.commit()
        stage.commit()
    await asyncio.sleep(LINGER_SECONDS / 2)
    with stage.rounds.held(0, ONE):
        await asyncio.sleep(LINGER_SECONDS)
    await asyncio.sleep(LINGER_SECONDS - 1)
    assert len(stage.rounds) == 1
    await asyncio.sleep(2)
    assert len(stage.rounds) == 0


@in_virtual_time
async def test_an_evaluations_round_is_let_go_of_at_once_unless_a_text_wants_it() -> None:
    stage = Anchors()
    with stage.rounds.held(0, ONE, linger_seconds=0.0):
        assert stage.rounds.find(0) is stage.rounds.find(0)
    await asyncio.sleep(0.1)
    assert len(stage.rounds) == 0
    assert stage.rounds.find(0) is not stage.rounds.find(0), "it is not held"
    with stage.rounds.held(0, ONE), stage.rounds.held(0, ONE, linger_seconds=0.0):
        pass
    await asyncio.sleep(LINGER_SECONDS - 1)
    assert len(stage.rounds) == 1
    await asyncio.sleep(2)
    assert len(stage.rounds) == 0


async def test_another_state_with_the_same_number_is_another_round() -> None:
    stage = Anchors()
    with stage.rounds.held(0, ONE) as before:
        stage.kept[0] = {"weight": torch.ones(1)}
        with stage.rounds.held(0, ONE) as after:
            assert float(after.on(torch.device("cpu"))["weight"]) == 1.0
        assert float(before.on(torch.device("cpu"))["weight"]) == 0.0


def test_a_text_that_moves_weights_to_a_gpu_leaves_tensors_of_the_usual_kind() -> None:
    """Those of inference mode would be compiled anew for an evaluation. The meta device stands in for the GPU."""
    held, meta = Anchors().rounds.find(0), torch.device("meta")
    with torch.inference_mode():
        weight = held.on(meta)["weight"]
    assert weight.device == meta
    assert not weight.is_inference()
    assert held.on(meta)["weight"] is weight
