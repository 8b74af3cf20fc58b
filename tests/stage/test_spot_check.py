"""Answers that other peers of a block compute again: who is found to compute wrongly, and who is not."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from swarm.config import RoundsConfig, RunConfig, WireConfig
from swarm.credentials.identity import generate
from swarm.errors import PeerUnavailable, RoundMismatch, SwarmError
from swarm.honesty.drift import FIRST_ROUND
from swarm.hop.spot_checks import ANCHOR_ROUND, LOSS, anchor_tensor, digests_of, loss_tensor
from swarm.rpc.ask import address_of, ask
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.wire import stage_stub
from swarm.stage.boundary import GRADIENT, HIDDEN, OUTPUT, OUTPUT_GRADIENT
from swarm.stage.endings import MOST_KEPT
from swarm.stage.spot_check import SpotCheck
from swarm.stage.staging import Download
from swarm.training.sketches import Statement
from swarm.types import Block
from tests.support.chain import (
    DILOCO,
    DROPOUT,
    INT8,
    SYNCHRONOUS,
    Chain,
    Peer,
    eventually,
    running_chain,
    samples_of,
)
from tests.support.chain_rounds import begin_next_round, commit_round

_Reply = pb.SpotCheckReply
Change = Callable[[torch.Tensor], torch.Tensor]

DRIFTING = dataclasses.replace(
    DILOCO, rounds=RoundsConfig(setting="diloco", round_samples=16, inner_batch_samples=2),
    optimizer=dataclasses.replace(DILOCO.optimizer, learning_rate=1e-3),
)  # fmt: skip
"""With an inner step after each microbatch."""
FP16 = dataclasses.replace(SYNCHRONOUS, wire=WireConfig(dtype="fp16"))


def _disproved(chain: Chain, stage: int) -> list[list[str]]:
    """The peers that each peer of a stage has found wrong."""
    return [list(peer.stage.context.records.disproved) for peer in chain.at(stage)]


def _is_distrusted(chain: Chain, peer: Peer) -> bool:
    senders = [chain.router, *(sender.router for sender in chain.peers)]
    return any(peer.peer_id in router.banned(Block(peer.backend.stage)) for router in senders)


def _change(monkeypatch: pytest.MonkeyPatch, peer: Peer, method: str, change: Change) -> None:
    """Let a peer send other tensors than it has computed: those that a method of its backend gives."""
    true = getattr(peer.backend, method)

    def changed(download: Download) -> Download:
        return Download(change(download.wait()))

    def lying(*arguments: object, **options: object) -> object:
        found = true(*arguments, **options)
        if method == "forward":
            found.wire_hidden = changed(found.wire_hidden)
            return found
        return tuple(changed(each) if isinstance(each, Download) else each for each in found)

    monkeypatch.setattr(peer.backend, method, lying)


async def _train_until(chain: Chain, done: Callable[[], bool], *, most_rounds: int = 8) -> None:
    """Train microbatch by microbatch, and round by round."""
    each, first = chain.config.rounds.round_samples // chain.config.data.microbatch_size, chain.peers[0].stage.round
    for index in range(each * most_rounds):
        await chain.train_all([index], round_number=first + index // each)
        await asyncio.sleep(0.02)  # Peers that check have a turn before the next one.
        if done():
            return
        if index % each == each - 1:
            await commit_round(chain)
    raise AssertionError("it did not come about")


def _exchanged(peers: Sequence[Peer], microbatch: int) -> Mapping[str, torch.Tensor]:
    """What one of the peers exchanged of a microbatch."""
    for peer in peers:
        if (entry := peer.stage.ledger.find(microbatch)) is not None:
            made = entry.computation and entry.computation.exchanged()
            return made or peer.stage.context.records.exchanged[microbatch]
    raise AssertionError("none of them has it")


def _request(chain: Chain, checked: Peer, microbatch: int, **others: torch.Tensor) -> pb.SpotCheckRequest:
    """A request to check a peer, as its sender makes it; some tensors may be others."""
    stage, made = checked.backend.stage, samples_of(chain.config, microbatch)
    made |= {LOSS: _exchanged([checked], microbatch)[LOSS]}
    if stage:
        sent = _exchanged(chain.at(stage - 1), microbatch)
        made |= {HIDDEN: sent[OUTPUT], GRADIENT: sent[OUTPUT_GRADIENT]}
    return pb.SpotCheckRequest(
        address=address_of(chain.config.run_id, Block(stage)), microbatch=microbatch, round=0,
        checked_id=checked.peer_id, next_id=next((peer.peer_id for peer in chain.at(stage + 1)), ""),
        digests=digests_of({**made, **others}),
    )  # fmt: skip


async def _ask(chain: Chain, checker: Peer, request: pb.SpotCheckRequest) -> pb.SpotCheckReply:
    stub = stage_stub(chain.peers[0].channels.channel(checker.record))
    reply: pb.SpotCheckReply = await ask(stub.SpotCheck, request, seconds=10.0)
    return reply


def _watch(monkeypatch: pytest.MonkeyPatch) -> list[pb.SpotCheckReply]:
    """The replies to all checks, as they come."""
    replies, true = list[pb.SpotCheckReply](), SpotCheck.answer

    async def watched(self: SpotCheck, context: object, request: pb.SpotCheckRequest) -> pb.SpotCheckReply:
        replies.append(await true(self, context, request))
        return replies[-1]

    monkeypatch.setattr(SpotCheck, "answer", watched)
    return replies


@pytest.mark.parametrize("config", [SYNCHRONOUS, DROPOUT, INT8, FP16], ids=["fp32", "dropout", "int8", "fp16"])
async def test_honest_peers_find_each_other_right(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = _watch(monkeypatch)
    async with running_chain(config, num_peers=(2, 2, 2), spans=False, check_share=1.0) as chain:
        await _train_until(chain, lambda: len(replies) >= 12)
        assert {reply.verdict for reply in replies} <= {_Reply.VERDICT_AGREES, _Reply.VERDICT_UNSPECIFIED}
        assert sum(reply.verdict == _Reply.VERDICT_AGREES for reply in replies) >= 6
        assert [_disproved(chain, stage) for stage in range(3)] == [[[], []]] * 3
        assert not any(_is_distrusted(chain, peer) for peer in chain.peers)
        await eventually(lambda: chain.is_idle)


def _noise(tensor: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    noisy: torch.Tensor = tensor + 0.1 * noise * tensor.norm() / noise.norm()
    return noisy


@pytest.mark.parametrize(
    ("stage", "method", "change"),
    [
        (2, "forward_loss", torch.neg),
        (2, "forward_loss", _noise),
        (1, "backward", lambda gradient: 2.0 * gradient),
        (1, "forward", lambda hidden: hidden.flip(1)),
        (0, "forward", torch.zeros_like),
    ],
    ids=["sign", "noise", "scaled", "activations", "first"],
)
async def test_a_peer_that_answers_wrongly_is_found_and_left_alone(
    stage: int, method: str, change: Change, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_peers = [1, 1, 1]
    num_peers[stage] = 4
    async with running_chain(SYNCHRONOUS, num_peers=num_peers, spans=False, check_share=1.0) as chain:
        liar, *honest = chain.at(stage)
        _change(monkeypatch, liar, method, change)
        with caplog.at_level(logging.WARNING):
            await _train_until(chain, lambda: _is_distrusted(chain, liar))
        found = [list(peer.stage.context.records.disproved) for peer in honest]
        assert found.count([liar.peer_id]) >= 2
        assert found.count([]) + found.count([liar.peer_id]) == 3
        assert not any(_is_distrusted(chain, peer) for peer in honest)
        assert "gets no more microbatches" in caplog.text


async def test_a_wrong_loss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(1, 1, 3), spans=False, check_share=1.0) as chain:
        liar, true = chain.at(2)[0], chain.at(2)[0].backend.forward_loss

        def lying(*arguments: Any, **options: Any) -> Any:
            loss, *others = true(*arguments, **options)
            return loss / 2, *others

        monkeypatch.setattr(liar.backend, "forward_loss", lying)
        await _train_until(chain, lambda: _is_distrusted(chain, liar))


async def test_a_sender_that_says_another_loss_accuses_nobody() -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(1, 1, 2), spans=False) as chain:
        await chain.ack(await chain.train(0))
        checked, checker = chain.at(2) if chain.at(2)[0].stage.ledger.find(0) else reversed(chain.at(2))
        assert (await _ask(chain, checker, _request(chain, checked, 0))).verdict == _Reply.VERDICT_AGREES
        other = await _ask(chain, checker, _request(chain, checked, 0, loss=loss_tensor(100.0)))
        assert (other.verdict, other.reason) == (
            _Reply.VERDICT_NOT_SHOWN,
            "it shows another loss than it exchanged",
        )
        assert _disproved(chain, 2) == [[], []]


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_the_sketch_that_a_peer_has_signed_is_compared(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_peers = [1, 1, 1]
    num_peers[stage] = 2
    async with running_chain(SYNCHRONOUS, num_peers=num_peers, spans=False) as chain:
        await chain.ack(await chain.train(0))
        checked, checker = chain.at(stage) if chain.at(stage)[0].stage.ledger.find(0) else reversed(chain.at(stage))
        entry = checked.stage.ledger.find(0)
        assert entry is not None
        assert entry.computation is not None
        sketch_N, key = entry.computation.sketch, generate()
        place = chain.config.run_id, str(Block(stage)), ""

        async def verdict(sketch_N: torch.Tensor, signer: str, microbatch: int = 0) -> pb.SpotCheckReply:
            signed = Statement.signed(key.sign_with_point, place, microbatch, 0, sketch_N)
            request = _request(chain, checked, 0)
            request.statements.append(pb.Statement(**signed._asdict()))
            with monkeypatch.context() as patch:
                # The peers of a chain have no keys.
                patch.setattr(Statement, "signer", lambda self, place: signer)
                return await _ask(chain, checker, request)

        assert (await verdict(sketch_N, checked.peer_id)).verdict == _Reply.VERDICT_AGREES
        wrong = await verdict(1.2 * sketch_N, checked.peer_id)
        assert (wrong.verdict, wrong.reason) == (
            _Reply.VERDICT_DIFFERS,
            "the gradient that it has signed differs by 17% from what follows from its inputs",
        )
        assert (await verdict(sketch_N[1:], checked.peer_id)).verdict == _Reply.VERDICT_DIFFERS
        # What somebody else has signed, or what is about another microbatch, accuses nobody.
        assert (await verdict(-sketch_N, checker.peer_id)).verdict == _Reply.VERDICT_AGREES
        assert (await verdict(-sketch_N, "")).verdict == _Reply.VERDICT_AGREES
        assert (await verdict(-sketch_N, checked.peer_id, 1)).verdict == _Reply.VERDICT_AGREES


async def test_of_two_peers_nobody_can_say_who_is_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(1, 2, 1), spans=False, check_share=1.0) as chain:
        _change(monkeypatch, chain.at(1)[0], "backward", torch.neg)
        with caplog.at_level(logging.WARNING):
            await _train_until(chain, lambda: "no other peer can say who is right" in caplog.text)
        assert not any(_is_distrusted(chain, peer) for peer in chain.peers)


async def test_a_false_accuser_is_outvoted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(1, 4, 1), spans=False, check_share=1.0) as chain:

        async def accuse(context: object, request: pb.SpotCheckRequest) -> pb.SpotCheckReply:
            return _Reply(verdict=_Reply.VERDICT_DIFFERS, reason="it says")

        monkeypatch.setattr(chain.at(1)[0].spot_check, "answer", accuse)
        with caplog.at_level(logging.WARNING):
            await _train_until(chain, lambda: "others find it right" in caplog.text)
        assert not any(_is_distrusted(chain, peer) for peer in chain.peers)


@pytest.mark.parametrize("error", [RoundMismatch("nothing is kept"), PeerUnavailable("it is silent")], ids=repr)
async def test_a_peer_that_shows_nothing_is_left_alone(error: SwarmError, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(1, 1, 3), spans=False, check_share=1.0) as chain:
        hiding = chain.at(2)[0]

        async def hide(context: object, request: pb.ShowRequest) -> None:
            raise error

        monkeypatch.setattr(hiding.spot_check.own, "show", hide)
        await _train_until(chain, lambda: _is_distrusted(chain, hiding))


async def test_what_a_peer_shows_has_to_be_what_its_neighbours_exchanged() -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(1, 2, 1), spans=False) as chain:
        await chain.ack(await chain.train(0))
        checked, checker = chain.at(1) if chain.at(1)[0].stage.ledger.find(0) else reversed(chain.at(1))
        assert (await _ask(chain, checker, _request(chain, checked, 0))).verdict == _Reply.VERDICT_AGREES
        other = await _ask(chain, checker, _request(chain, checked, 0, hidden_gradient=torch.zeros(1)))
        assert (other.verdict, other.reason) == (
            _Reply.VERDICT_NOT_SHOWN,
            "it shows another hidden_gradient than it exchanged",
        )
        # Of the peer and the next one, nobody knows which one tells something else.
        following = chain.at(2)[0]
        known = following.stage.ledger.find(0)
        assert known is not None
        assert known.computation is not None
        told = known.computation.exchanged()
        assert told is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(known.computation, "exchanged", lambda: {**told, HIDDEN: torch.zeros(1)})
            disputed = await _ask(chain, checker, _request(chain, checked, 0))
        assert disputed.verdict == _Reply.VERDICT_UNSPECIFIED
        assert disputed.reason == f"{checked.peer_id} and {following.peer_id} tell hidden differently"


async def test_nothing_is_known_of_a_microbatch_whose_round_is_over() -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(1, 2, 1), spans=False) as chain:
        await chain.ack(await chain.train(0))
        checked, checker = chain.at(1) if chain.at(1)[0].stage.ledger.find(0) else reversed(chain.at(1))
        request = _request(chain, checked, 0)
        await begin_next_round(chain.peers)
        reply = await _ask(chain, checker, request)
        assert (reply.verdict, reply.reason) == (
            _Reply.VERDICT_UNSPECIFIED,
            "microbatch 0 is not kept, this peer is at 1",
        )


async def _pass_first_rounds(chain: Chain) -> None:
    for _ in range(FIRST_ROUND):
        await begin_next_round(chain.peers)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
async def test_with_diloco_honest_peers_find_each_other_right(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replies, num_peers = _watch(monkeypatch), [1, 1, 1]
    num_peers[stage] = 4
    async with running_chain(DRIFTING, num_peers=num_peers, spans=False, check_share=1.0) as chain:
        await _pass_first_rounds(chain)
        await _train_until(
            chain, lambda: [each.verdict for each in replies].count(_Reply.VERDICT_AGREES) >= 12, most_rounds=64
        )
        assert {each.verdict for each in replies} == {_Reply.VERDICT_AGREES, _Reply.VERDICT_UNSPECIFIED}
        assert _disproved(chain, stage) == [[], [], [], []]
        await eventually(lambda: chain.is_idle)


@pytest.mark.parametrize(
    ("stage", "method", "change"),
    [
        (2, "forward_loss", torch.neg),
        pytest.param(2, "forward_loss", lambda gradient: 10.0 * gradient, marks=pytest.mark.slow),
        pytest.param(1, "backward", lambda gradient: gradient.flip(0), marks=pytest.mark.slow),
        pytest.param(1, "forward", lambda hidden: hidden.flip(1), marks=pytest.mark.slow),
        pytest.param(0, "forward", lambda hidden: hidden.flip(1), marks=pytest.mark.slow),
    ],
    ids=["sign", "scaled", "another", "activations", "first"],
)
async def test_with_diloco_a_peer_that_answers_wrongly_is_found_and_left_alone(
    stage: int, method: str, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_peers = [1, 1, 1]
    num_peers[stage] = 4
    async with running_chain(DRIFTING, num_peers=num_peers, spans=False, check_share=1.0) as chain:
        await _pass_first_rounds(chain)
        liar, *honest = chain.at(stage)
        _change(monkeypatch, liar, method, change)
        # It is chance when all know what is usual.
        await _train_until(chain, lambda: _is_distrusted(chain, liar), most_rounds=64)
        # Two of three have found each answer wrong, and it may have been two others each time.
        found = {peer for each in honest for peer in each.stage.context.records.disproved}
        assert found <= {liar.peer_id}
        assert not any(_is_distrusted(chain, peer) for peer in honest)


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_with_diloco_what_was_computed_with_the_anchor_has_to_be_the_same(stage: int) -> None:
    num_peers = [1, 1, 1]
    num_peers[stage] = 2
    async with running_chain(DRIFTING, num_peers=num_peers, spans=False) as chain:
        pairs = [chain.at(stage), chain.at(stage)[::-1]]
        for index in range(MOST_KEPT):
            await chain.train_all([index])
        for checked, checker in pairs:
            kept = checked.stage.context.records.exchanged
            (first,) = (index for index, made in kept.items() if ANCHOR_ROUND in made)
            said = _request(chain, checked, first, **{ANCHOR_ROUND: anchor_tensor(0)})
            assert checker.weights.inner_steps.count > 0
            assert (await _ask(chain, checker, said)).verdict == _Reply.VERDICT_AGREES
            unsaid = await _ask(chain, checker, _request(chain, checked, first))
            assert unsaid.reason == "the run has just begun"
            # A sender says it in its place.
            later = max(kept.keys() - {first})
            false = await _ask(chain, checker, _request(chain, checked, later, **{ANCHOR_ROUND: anchor_tensor(0)}))
            assert (false.verdict, false.reason) == (
                _Reply.VERDICT_NOT_SHOWN,
                "it says otherwise than before whether it has used the round's anchor",
            )
        await begin_next_round(chain.peers)
        assert (await _ask(chain, checker, said)).verdict == _Reply.VERDICT_AGREES, "the last anchor is kept"
        assert _disproved(chain, stage) == [[], []]


async def test_with_diloco_one_wrong_answer_from_the_anchor_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_chain(DRIFTING, num_peers=(1, 1, 4), spans=False, check_share=1.0) as chain:
        liar, *honest = chain.at(2)
        _change(monkeypatch, liar, "forward_loss", _noise)
        await _train_until(chain, lambda: _is_distrusted(chain, liar))
        assert chain.peers[0].stage.round < FIRST_ROUND
        found = [list(peer.stage.context.records.disproved) for peer in honest]
        assert found.count([liar.peer_id]) >= 2
        assert found.count([]) + found.count([liar.peer_id]) == 3
        assert not any(_is_distrusted(chain, peer) for peer in honest)


async def test_with_diloco_few_microbatches_are_kept_to_be_shown() -> None:
    async with running_chain(DRIFTING, num_peers=(1, 1, 2), spans=False) as chain:
        assert (await _ask(chain, chain.at(2)[0], pb.SpotCheckRequest(
            address=address_of(DRIFTING.run_id, Block(2)), checked_id=chain.at(2)[1].peer_id
        ))).reason == "the run has just begun"  # fmt: skip
        await _pass_first_rounds(chain)
        await chain.train_all([0], round_number=FIRST_ROUND)
        checked, checker = chain.at(2) if chain.at(2)[0].stage.ledger.find(0) else reversed(chain.at(2))
        request = _request(chain, checked, 0)
        assert (await _ask(chain, checker, request)).reason == "this peer has seen too little of others to tell"
        kept = checked.stage.context.records.exchanged
        for index in range(1, 8 * MOST_KEPT):
            if 0 in kept:
                await chain.train_all([index], round_number=FIRST_ROUND)
        assert len(kept) == MOST_KEPT
        gone = await _ask(chain, checker, request)
        assert (gone.verdict, gone.reason) == (
            _Reply.VERDICT_UNSPECIFIED,
            "microbatch 0 is not kept, this peer is at 2",
        )
