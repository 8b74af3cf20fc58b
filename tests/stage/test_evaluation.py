"""Evaluations give the reference's loss on the weights of one round, however many rounds pass meanwhile."""

import asyncio
import dataclasses
import itertools
from contextlib import closing
from functools import partial
from typing import Any, cast

import pytest
import torch

from peers.trainer.held_out_loss import CONCURRENCY, Along, held_out_loss
from swarm.config import RoundsConfig, RunConfig
from swarm.data.microbatches import HeldOut, Microbatches
from swarm.errors import RoundGone
from swarm.hop.answers import HopListener
from swarm.model.stages import build_transformer
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.stage.boundary import HIDDEN
from swarm.stage.runtime import Priority
from swarm.training.samples import TOKENS
from tests.support.chain import ANY_HOP, DILOCO, DROPOUT, SYNCHRONOUS, Chain, eventually, running_chain, tokens
from tests.support.chain_rounds import begin_next_round

pytestmark = ANY_HOP

BATCH = {TOKENS: tokens(SYNCHRONOUS, 99)}


class Texts:
    """Two datasets of a few microbatches."""

    def held_out_by_source(self, num_samples: int) -> list[HeldOut]:
        batches = [{TOKENS: tokens(SYNCHRONOUS, number)} for number in range(num_samples)]
        return [HeldOut(name=name, batches=batches[part::2], share=1.0) for part, name in enumerate(("even", "odd"))]


DATA = cast(Microbatches, Texts())


def _num_held(chain: Chain) -> list[int]:
    return [len(peer.stage.held_rounds) for peer in chain.peers]


def _pass_a_round_before_each_microbatch(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all peers begin the next round each time that the trainer evaluates a microbatch."""
    evaluate, passing, num_asked = chain.trainer.evaluate, asyncio.Lock(), itertools.count(1)
    all_hold = asyncio.Event()

    async def later(*args: Any, path: int) -> float:
        # A peer that has not been asked to hold round 0 would no longer have it.
        if next(num_asked) == CONCURRENCY:
            all_hold.set()
        await all_hold.wait()
        async with passing:
            await begin_next_round(chain.peers)
        return await evaluate(*args, path=path)

    monkeypatch.setattr(chain.trainer, "evaluate", later)


@pytest.mark.parametrize("config", [SYNCHRONOUS, DILOCO], ids=["synchronous", "diloco"])
async def test_rounds_may_pass_faster_than_an_evaluation_takes(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_chain(config, num_peers=(2, 2, 2)) as chain:
        alongs = [Along(0, chain.trainer, HopListener())]
        expected = await held_out_loss(alongs, DATA, round_number=0, num_samples=8)
        assert expected.by_source["even"] != expected.by_source["odd"]
        _pass_a_round_before_each_microbatch(chain, monkeypatch)
        assert await held_out_loss(alongs, DATA, round_number=0, num_samples=8) == expected
        assert [peer.stage.round for peer in chain.peers] == 6 * [8]
        # Training has gone beyond the round, and no peer keeps it longer than necessary.
        await eventually(lambda: not any(_num_held(chain)))
        with pytest.raises(RoundGone, match="round 0 is not kept"):
            await chain.evaluate(BATCH)


async def test_a_round_is_held_at_one_peer_of_each_stage_until_the_caller_closes_it() -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(2, 2, 2)) as chain:
        expected = await chain.evaluate(BATCH)
        with closing(await chain.trainer.hold(0, HopListener())) as hold:
            holders = [peer for peer in chain.peers if len(peer.stage.held_rounds)]
            assert hold.held == tuple(pb.HeldRound(peer_id=peer.peer_id, round=0) for peer in holders)
            assert [peer.backend.stage for peer in holders] == [0, 1, 2]
            for _ in range(3):
                await begin_next_round(chain.peers)
            assert await chain.trainer.evaluate(BATCH, hold.held, HopListener()) == expected
        await eventually(lambda: not any(_num_held(chain)))
        with pytest.raises(RoundGone):
            await chain.trainer.evaluate(BATCH, hold.held, HopListener())


async def test_a_caller_that_is_gone_holds_nothing() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        async with chain.another_trainer() as trainer:
            hold = await trainer.hold(0, HopListener())
            assert _num_held(chain) == [1, 1, 1]
        # Its connections are closed.
        await eventually(lambda: not any(_num_held(chain)))
        hold.close()


async def test_in_diloco_each_stage_holds_its_newest_round_up_to_the_wanted_one() -> None:
    async with running_chain(DILOCO) as chain:
        for _ in range(2):
            await begin_next_round([chain.peers[0], chain.peers[2]])
        with closing(await chain.trainer.hold(1, HopListener())) as hold:
            assert [held.round for held in hold.held] == [1, 0, 1]
            first = await chain.trainer.evaluate(BATCH, hold.held, HopListener())
            for _ in range(3):
                await begin_next_round(chain.peers)
            assert await chain.trainer.evaluate(BATCH, hold.held, HopListener()) == first


async def test_a_holder_that_dies_is_replaced_by_a_peer_that_has_the_round() -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(1, 2, 1)) as chain:
        expected = await chain.evaluate(BATCH)
        with closing(await chain.trainer.hold(0, HopListener())) as hold:
            (dying,) = (peer for peer in chain.at(1) if peer.peer_id == hold.held[1].peer_id)
            await dying.server.stop(0)
            await begin_next_round([peer for peer in chain.peers if peer is not dying])
            assert await chain.trainer.evaluate(BATCH, hold.held, HopListener()) == expected


async def test_evaluation_is_the_references_on_the_anchor() -> None:
    """Inner steps since the anchor do not count, and dropout is off."""
    config = dataclasses.replace(
        DILOCO, model=DROPOUT.model, rounds=RoundsConfig(round_samples=16, inner_batch_samples=2)
    )
    model = build_transformer(config, device="cpu")
    batch = tokens(config, 99)
    async with running_chain(config) as chain:
        await chain.train_all(range(4))
        assert min(peer.weights.round_samples for peer in chain.peers) > 0
        with torch.no_grad():
            expected = float(model.loss(batch.long()))
        loss = await chain.evaluate({TOKENS: batch})
        assert loss == pytest.approx(expected, abs=1e-5)
        chain.assert_idle()


async def test_an_evaluation_has_its_turn_however_much_training_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation runs after older work and before later work. Otherwise it would never end at the slowest stage."""
    async with running_chain(SYNCHRONOUS) as chain:
        last, order = chain.peers[2], list[str]()
        inputs = {TOKENS: tokens(SYNCHRONOUS, 99), HIDDEN: torch.zeros(2, 16, 32)}
        evaluate = last.backend.evaluate

        def note(*args: Any, **named: Any) -> torch.Tensor:
            order.append("evaluate")
            return evaluate(*args, **named)

        monkeypatch.setattr(last.backend, "evaluate", note)

        def forward(name: str) -> asyncio.Task[tuple[None, float]]:
            work = last.runtime.run(partial(order.append, name), priority=Priority.FORWARD, age=last.runtime.next_age())
            return asyncio.create_task(work)

        async with last.held():
            forwards = [forward("before")]
            await eventually(lambda: last.runtime.queue_length == 2)
            held = [pb.HeldRound(peer_id=last.peer_id)]
            evaluating = asyncio.create_task(chain.peers[1].hop.evaluate(inputs, held, HopListener()))
            await eventually(lambda: last.runtime.queue_length == 3)
            forwards += [forward("after") for _ in range(3)]
            await eventually(lambda: last.runtime.queue_length == 6)
        await asyncio.gather(evaluating, *forwards)
        assert order == ["before", "evaluate", "after", "after", "after"]
