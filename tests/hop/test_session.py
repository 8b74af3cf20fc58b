"""What a peer may send as a session's scores, and how many may be ordered."""

import math
from dataclasses import fields

import pytest

from swarm.errors import MalformedMessage, PeerUnavailable
from swarm.generation.sampling import MOST_SCORES, Sampling, Scores, Scoring
from swarm.hop.session import Order, Token, pack_sampling, pack_token, unpack_order, unpack_token
from swarm.rpc.v1 import generation_pb2 as pb

ORDER = Order(sampling=Sampling(), num_positions=9, vocab_size=8, scoring=Scoring(first=3, num_top=2))


def _sampled(logprobs: list[float], top: list[int], top_logprobs: list[float]) -> pb.Sampled:
    assert ORDER.scoring is not None
    scores = Scores(ORDER.scoring)
    scores.extend(logprobs, top, top_logprobs)
    return pack_token(Token(position=4, token=1, scores=scores))


def test_scores_arrive_as_they_were_sent() -> None:
    token = unpack_token(_sampled([-0.5, 0.0], [1, 7, 3, 1], [-0.5, -1.0, 0.0, -9.0]), ORDER)
    assert token.scores is not None
    assert (token.scores.at(3), token.scores.at(5)) == ((-0.5, [(1, -0.5), (7, -1.0)]), None)


@pytest.mark.parametrize(
    "packed",
    [
        _sampled([-1.0] * 3, [1] * 6, [-1.0] * 6),
        _sampled([-1.0], [1], [-1.0]),
        _sampled([-1.0], [1, 2], [-1.0]),
        _sampled([-1.0], [1, 8], [-1.0, -2.0]),
        _sampled([0.5], [1, 2], [-1.0, -2.0]),
        _sampled([-1.0], [1, 2], [-1.0, math.nan]),
        _sampled([-math.inf], [1, 2], [-1.0, -2.0]),
    ],
    ids=["too many", "too few of the likeliest", "not paired", "unknown", "above 1", "not a number", "infinite"],
)
def test_other_scores_are_refused(packed: pb.Sampled) -> None:
    with pytest.raises(PeerUnavailable, match="score"):
        unpack_token(packed, ORDER)


def test_scores_that_nobody_ordered_are_refused() -> None:
    order = Order(sampling=Sampling(), num_positions=9, vocab_size=8)
    assert unpack_token(pb.Sampled(position=4, token=1), order) == Token(4, 1)
    with pytest.raises(PeerUnavailable, match="others are wanted"):
        unpack_token(pb.Sampled(position=4, token=1, logprobs=[-1.0]), order)


def test_every_sampling_parameter_travels_by_its_name() -> None:
    assert [field.name for field in pb.Sampling.DESCRIPTOR.fields] == [field.name for field in fields(Sampling)]
    sampling = Sampling(temperature=0.5, top_p=0.25, top_k=3, seed=-(10**30))
    assert all(getattr(sampling, field.name) != field.default for field in fields(Sampling))
    opening = pb.SessionOpen(num_positions=9, sampling=pack_sampling(sampling))
    assert unpack_order(opening, vocab_size=8).sampling == sampling


@pytest.mark.parametrize("seed", ["", "x", "1" * 41])
def test_a_seed_is_a_number_of_bounded_length(seed: str) -> None:
    with pytest.raises(MalformedMessage, match="sampling: "):
        unpack_order(pb.SessionOpen(num_positions=9, sampling=pb.Sampling(seed=seed)), vocab_size=8)


@pytest.mark.parametrize(
    ("first", "num_top", "num_positions"), [(0, 1, 9), (1, 21, 9), (1, 9, 9), (1, 1, MOST_SCORES + 1)]
)
def test_an_order_of_scores_has_bounds(first: int, num_top: int, num_positions: int) -> None:
    opening = pb.SessionOpen(
        num_positions=num_positions,
        sampling=pack_sampling(Sampling()),
        scoring=pb.Scoring(first=first, num_top=num_top),
    )
    with pytest.raises(MalformedMessage):
        unpack_order(opening, vocab_size=8)
    opening.scoring.CopyFrom(pb.Scoring(first=1, num_top=8))
    opening.num_positions = 9
    assert unpack_order(opening, vocab_size=8).scoring == Scoring(first=1, num_top=8)
