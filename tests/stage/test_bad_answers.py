"""What a hop makes of peers that answer nonsense, or refuse: another peer is asked, and who is at fault is banned."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from swarm.config import RunConfig
from swarm.errors import NotAllowed, RetriesExhausted, SwarmError
from swarm.hop.answers import pack_route
from swarm.hop.retries import HopLimits
from swarm.rpc.bounds import LONGEST_MESSAGE_LIST
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.stage import servicer
from swarm.types import Block, PeerId
from tests.support.chain import DILOCO, INT8, SYNCHRONOUS, Peer, running_chain
from tests.support.chunks import chunks, int8_blocks

_HIDDEN = torch.zeros(2, 16, 32)
_NAN = _HIDDEN.index_fill(1, torch.tensor([3]), float("nan"))


@dataclass
class _Garbage:
    """A message that is none."""

    data: bytes

    def SerializeToString(self) -> bytes:
        return self.data


_ACCEPTED, _DONE = pb.TrainReply(accepted=pb.Accepted()), pb.TrainReply(done=pb.Done())


def _answer(gradient: torch.Tensor, done: pb.TrainReply = _DONE) -> list[pb.TrainReply | _Garbage]:
    return [_ACCEPTED, *(pb.TrainReply(chunks=[chunk]) for chunk in chunks("hidden_gradient", gradient)), done]


@pytest.mark.parametrize(
    ("config", "garbage"),
    [
        (SYNCHRONOUS, [_Garbage(b"\xff")]),
        (SYNCHRONOUS, [_ACCEPTED, _Garbage(b"\x22\x05\x12")]),
        (SYNCHRONOUS, [_DONE]),
        (SYNCHRONOUS, [_ACCEPTED]),
        (SYNCHRONOUS, [_ACCEPTED, pb.TrainReply()]),
        (SYNCHRONOUS, [_ACCEPTED, _ACCEPTED]),
        (SYNCHRONOUS, [_ACCEPTED, _DONE]),
        (SYNCHRONOUS, [_ACCEPTED, pb.TrainReply(chunks=chunks("x", _HIDDEN))]),
        (SYNCHRONOUS, _answer(_NAN)),
        (SYNCHRONOUS, _answer(_HIDDEN, pb.TrainReply(done=pb.Done(loss=float("nan"))))),
        (SYNCHRONOUS, _answer(_HIDDEN, pb.TrainReply(done=pb.Done(loss=1.0, num_targets=31)))),
        (INT8, _answer(int8_blocks(float("nan")))),
    ],
)
async def test_a_peer_that_answers_nonsense_is_banned_and_another_one_asked(
    config: RunConfig, garbage: list[pb.TrainReply | _Garbage], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_chain(config, num_peers=(1, 2, 1)) as chain:
        first, (bad, good) = chain.peers[0], chain.at(1)

        async def talk_nonsense(context: Any, _: object) -> None:
            for reply in garbage:
                await context.write(reply)
            await context.read()

        monkeypatch.setattr(bad.servicer, "_train", talk_nonsense)
        await chain.train_all(range(2))
        assert (bad.stage.counters["forwards"], good.stage.counters["forwards"]) == (0, 2)
        assert first.router.banned(Block(1)) == {bad.peer_id}
        assert all(bool(value.isfinite().all()) for value in first.weights.buckets.open().sums.values())


async def test_what_a_peer_says_of_later_stages_gets_nobody_banned_who_passes_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = [pb.RouteEntry(stage=2, variant=number, peer_id="x") for number in range(LONGEST_MESSAGE_LIST)]

    def route(peers: Mapping[Block, PeerId]) -> list[pb.RouteEntry]:
        return pack_route(peers) or many  # The last stage has none to name.

    monkeypatch.setattr(servicer, "pack_route", route)
    async with running_chain(SYNCHRONOUS, num_peers=(1, 1, 1)) as chain:
        first = chain.peers[0]
        await chain.train_all([0])
        assert chain.router.banned(Block(0)) == first.router.banned(Block(1)) == set()
        chain.assert_accumulated([0])


async def test_a_peer_that_computes_nonsense_is_banned_by_those_before_it() -> None:
    """The next peer refuses the nonsense, and neither it nor the trainer is at fault."""
    async with running_chain(SYNCHRONOUS, num_peers=(2, 1, 1)) as chain:
        bad, good = chain.at(0)
        with torch.no_grad():
            for value in bad.weights.version.parameters.values():
                value.fill_(float("nan"))
        await chain.train_all(range(4))
        assert chain.router.banned(Block(0)) == {bad.peer_id}
        assert bad.router.banned(Block(1)) == good.router.banned(Block(1)) == set()
        assert sorted(good.stage.ledger.committed(0)) == [0, 1, 2, 3]
        assert bad.num_idle == (0, 0, 0, 0)


async def test_one_peer_s_word_that_what_it_got_is_nonsense_blames_nobody_before_it() -> None:
    """That peer's own weights may be broken. Another peer of its stage takes the same, and is believed."""
    async with running_chain(DILOCO, num_peers=(1, 1, 2)) as chain:
        first, middle, (bad, good) = chain.peers[0], chain.peers[1], chain.at(2)
        with torch.no_grad():
            for value in bad.weights.version.parameters.values():
                value.fill_(float("nan"))
        await chain.train_all(range(4))
        assert chain.router.banned(Block(0)) == first.router.banned(Block(1)) == set()
        assert middle.router.banned(Block(2)) == {bad.peer_id}
        assert good.weights.buckets.open().num_samples == 8


async def test_a_peer_that_has_moved_to_another_stage_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(1, 1, 1)) as chain:
        first, middle, last = chain.peers
        choose, chosen = first.router.choose, list[Any]()

        def choosing(*of: Any, **how: Any) -> Any:
            chosen.append(choose(*of, **how))
            return chosen[-1]

        monkeypatch.setattr(first.router, "choose", choosing)
        moved = last.record.model_copy(update={"stage": 1, "announced_at": 1.0})
        first.router.update(Block(1), [moved, middle.record])
        await chain.train_all(range(4))
        chain.assert_accumulated(range(4))
        assert moved in chosen
        assert first.router.banned(Block(1)) == set()


def _refuse_all(monkeypatch: pytest.MonkeyPatch, peer: Peer, refusal: SwarmError) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise refusal

    monkeypatch.setattr(peer.stage.admission, "admit", refuse)


async def test_whom_all_refuse_hears_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_chain(SYNCHRONOUS, hop_limits=HopLimits(max_failures=1, retry_seconds=0.02)) as chain:
        _refuse_all(monkeypatch, chain.at(1)[0], NotAllowed("a token has expired"))
        with pytest.raises(RetriesExhausted, match="stage 1: 1 peer failed in a row; the last: a token has expired"):
            await chain.train(0)
