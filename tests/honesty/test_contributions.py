"""Members that contribute something else than what they have answered are left out of rounds and named, and nobody else
is: in whole swarms."""

import asyncio
import dataclasses
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.audit.audit import audit
from swarm.audit.history import read
from swarm.config import RunConfig
from swarm.events import Checked, OutOfLine
from swarm.hop import spot_checks
from swarm.hop.hop import Hop
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.stage.boundary import HIDDEN
from swarm.stage.weights import StageWeights
from swarm.training.round_member import Contribution
from swarm.training.samples import Microbatch
from swarm.types import Block
from tests.support.chain import SYNCHRONOUS
from tests.support.whole_swarm import WholePeer, WholeSwarm, whole_swarm

Tensors = dict[str, torch.Tensor]


def _config(round_samples: int, check_share: float = 0.001) -> RunConfig:
    rounds = dataclasses.replace(SYNCHRONOUS.rounds, round_samples=round_samples, check_share=check_share)
    return dataclasses.replace(SYNCHRONOUS, rounds=rounds)


def _named(peers: Sequence[WholePeer]) -> set[str]:
    lines = [line for peer in peers if peer.server for line in peer.server.describe().averaging.refusals]
    return {line.partition(" lies: ")[0] for line in lines if " lies: " in line}


def _accused(swarm: WholeSwarm) -> list[Any]:
    """What any peer has found wrong, or been told."""
    events = [line.event for log in swarm.logs for line in read(log)]
    found = [each for each in events if isinstance(each, Checked) and each.verdict == "differs"]
    return found + [each for each in events if isinstance(each, OutOfLine)]


def _weights(peer: WholePeer) -> StageWeights:
    assert peer.server is not None
    return peer.server.stage.context.backend.weights


def _contribute(
    peer: WholePeer,
    lie: Callable[[Tensors, Tensors], Tensors],
    *,
    states_to_fit: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Let a peer answer rightly, and from round 1 on contribute something else, made of its true contributions to this
    round and the last one; and state other sketches."""
    assert peer.server is not None
    member, true_freeze, seen = peer.server.member, peer.server.member.freeze, dict[int, Tensors]()

    async def freeze(round_number: int, *, drop: Collection[int]) -> Contribution:
        true = await true_freeze(round_number, drop=drop)
        seen[round_number] = dict(true.tensors)
        if not round_number or not true.num_samples:
            return true
        assert true.sketched is not None
        own = {index: states_to_fit(each) for index, each in true.sketched.own.items()}
        return dataclasses.replace(
            true, tensors=lie(seen[round_number], seen[round_number - 1]),
            sketched=dataclasses.replace(true.sketched, own=own),
        )  # fmt: skip

    member.freeze = freeze  # type: ignore[method-assign]


LIES: dict[str, Callable[[Tensors, Tensors], Tensors]] = {
    "zeros": lambda true, last: {name: torch.zeros_like(value) for name, value in true.items()},
    "flipped": lambda true, last: {name: -value for name, value in true.items()},
    "scaled": lambda true, last: {name: 1.2 * value for name, value in true.items()},
    "yesterday's": lambda true, last: last,
}


async def _name_liar(swarm: WholeSwarm, let_lie: Callable[[WholePeer], None]) -> None:
    """Let a peer of the last stage lie from round 1 on, and see that it is named after two rounds, and nobody else."""
    liar, *honest = [peer for peer in swarm.peers if peer.stage == 2]
    let_lie(liar)
    await swarm.train(1)
    assert _named(honest) == set()
    await swarm.train(2, first=1)
    assert _named(honest) == {liar.peer_id}
    assert {event.peer for event in _accused(swarm)} == {liar.peer_id}
    assert audit(swarm.logs).findings.violations == []


@pytest.mark.parametrize(
    "lie", ["scaled", *(pytest.param(lie, marks=pytest.mark.slow) for lie in LIES if lie != "scaled")]
)
async def test_who_contributes_something_else_than_it_answers_is_named(lie: str, tmp_path: Path) -> None:
    async with whole_swarm(_config(16), tmp_path / "events", num_peers=(1, 1, 4)) as swarm:
        await _name_liar(swarm, lambda liar: _contribute(liar, LIES[lie], states_to_fit=lambda sketch: sketch))


@pytest.mark.slow
async def test_who_contributes_another_microbatchs_gradients_is_named(tmp_path: Path) -> None:
    def let_lie(liar: WholePeer) -> None:
        weights, kept = _weights(liar), list[list[torch.Tensor]]()
        true = weights.accumulate

        def accumulate(gradients: Any, source: Any) -> Any:
            kept.append([gradient.clone() for gradient in gradients])
            return true(kept[-1 if weights.round.number == 0 else 0], source)

        weights.accumulate = accumulate  # type: ignore[method-assign]

    async with whole_swarm(_config(16), tmp_path / "events", num_peers=(1, 1, 4)) as swarm:
        await _name_liar(swarm, let_lie)


@pytest.mark.slow
async def test_who_states_sketches_to_fit_has_signed_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What gathers is passed on to one member, and these rounds are so short that all of it would gather once.
    monkeypatch.setattr(spot_checks, "GATHER_SECONDS", 0.0)
    async with whole_swarm(_config(512), tmp_path / "events", num_peers=(1, 1, 4)) as swarm:
        await _name_liar(swarm, lambda liar: _contribute(liar, LIES["flipped"], states_to_fit=torch.neg))


# -- honest members ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_nobody_is_accused_while_peers_die_and_join_and_answers_are_given_up(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    async with whole_swarm(_config(32, check_share=0.3), tmp_path / "events", num_peers=(1, 2, 4)) as swarm:
        for peer in swarm.peers:
            for hop in peer.server.stage.context.hops.values() if peer.server else ():
                _give_up_some(hop, rng)
        training = asyncio.create_task(swarm.train(5))
        for stage in (2, 1, 2):
            await asyncio.sleep(rng.uniform(0.1, 0.5))
            victim = rng.choice([peer for peer in swarm.peers if peer.stage == stage and peer.server])
            await swarm.start(stage)
            await victim.kill()
        await training
        living = [peer for peer in swarm.peers if peer.task and not peer.task.done()]
        assert _named(living) == set()
    assert _accused(swarm) == []
    assert audit(swarm.logs).findings.violations == []


def _give_up_some(hop: Hop, rng: random.Random) -> None:
    """Let a sender give up some answers and ask again."""
    true = hop.train

    async def train(*arguments: Any) -> Any:
        while rng.random() < 0.3:
            (await true(*arguments)).close()
        return await true(*arguments)

    hop.train = train  # type: ignore[assignment, method-assign]


async def _close(reply: Any) -> None:
    reply.close()


async def test_a_sender_that_lies_has_nobody_accused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has peers compute from wrong inputs first, and passes on what they have signed then, and other things."""
    async with whole_swarm(_config(32, check_share=0.3), tmp_path / "events", num_peers=(1, 2, 4)) as swarm:
        liar = next(peer for peer in swarm.peers if peer.stage == 1)
        assert liar.server is not None
        hop, rng = liar.server.stage.context.hops[Block(2)], random.Random(0)
        true_train, true_acknowledged = hop.train, hop.checks.acknowledged

        async def train(microbatch: Microbatch, tensors: Any, *others: Any) -> Any:
            wrong = {**tensors, HIDDEN: tensors[HIDDEN].flip(0)}
            reply = await true_train(microbatch, wrong, *others)
            if rng.random() < 0.5:
                return reply
            await (reply.ack() if rng.random() < 0.5 else _close(reply))
            return await true_train(microbatch, tensors, *others)

        def acknowledged(microbatch: Microbatch, tensors: Any, reply: Any, statement: pb.Statement | None) -> None:
            reply.loss *= 2.0
            for number in range(3):
                if statement is None:
                    return
                forged = pb.Statement()
                forged.CopyFrom(statement)
                forged.sketch = statement.sketch if number == 0 else statement.sketch[::-1]
                forged.microbatch += number == 2
                true_acknowledged(microbatch, tensors, reply, forged)

        monkeypatch.setattr(hop, "train", train)
        monkeypatch.setattr(hop.checks, "acknowledged", acknowledged)
        await swarm.train(4)
        others = [peer for peer in swarm.peers if peer is not liar]
        assert _named(others) <= {liar.peer_id}
    assert {event.peer for event in _accused(swarm)} <= {liar.peer_id}
