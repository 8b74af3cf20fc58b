"""Tokens are drawn as the parameters say, and follow from the seed and the position."""

from collections import Counter
from typing import Any

import pytest
import torch

from swarm.generation.decoding import choose
from swarm.generation.sampling import Sampling

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])
DRAWS = 1000


def _drawn(logits: torch.Tensor, count: int = DRAWS, **parameters: Any) -> Counter[int]:
    sampling = Sampling(**parameters)
    return Counter(choose(logits, sampling, position) for position in range(count))


def test_no_temperature_takes_the_likeliest_token() -> None:
    assert _drawn(LOGITS, 10, temperature=0.0) == {1: 10}
    assert choose(torch.tensor([1.0, 2.0, 2.0]), Sampling(temperature=0.0), 0) == 1


@pytest.mark.parametrize("temperature", [1e-9, 1e-308, 5e-324])
def test_however_low_a_temperature_is_it_takes_the_likeliest_token(temperature: float) -> None:
    """If several tokens are equally likely, one of them is taken. No logit becomes infinite or NaN."""
    assert _drawn(1000.0 * LOGITS, 10, temperature=temperature, top_p=0.9) == {1: 10}
    assert _drawn(torch.tensor([-2.0, 1.0, 1.0]), 40, temperature=temperature).keys() == {1, 2}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax_s(temperature: float) -> None:
    found, expected = _drawn(LOGITS, temperature=temperature), (LOGITS / temperature).softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        # The tolerance is five standard deviations of a share of so many draws.
        assert found[token] / DRAWS == pytest.approx(
            probability, abs=5 * (probability * (1 - probability) / DRAWS) ** 0.5
        )


def test_top_k_leaves_the_rest_out() -> None:
    assert _drawn(LOGITS, top_k=2).keys() == {1, 3}
    assert _drawn(LOGITS, 20, top_k=1) == {1: 20}
    assert _drawn(LOGITS, top_k=99).keys() == {0, 1, 2, 3, 4}


def test_top_p_takes_as_many_as_reach_it() -> None:
    assert _drawn(LOGITS, top_p=0.0).keys() == {1}
    first, second, third = LOGITS.softmax(-1).sort(descending=True).values[:3].tolist()
    assert _drawn(LOGITS, top_p=first - 0.01).keys() == {1}
    assert _drawn(LOGITS, top_p=first + 0.01).keys() == {1, 3}
    assert _drawn(LOGITS, top_p=first + second + third - 0.001).keys() == {1, 3, 2}


def test_a_choice_follows_from_seed_and_position() -> None:
    flat = torch.zeros(1000)
    one = [choose(flat, Sampling(seed=1), position) for position in range(20)]
    assert one == [choose(flat, Sampling(seed=1), position) for position in range(20)]
    assert one != [choose(flat, Sampling(seed=2), position) for position in range(20)]
    assert len(set(one)) > 15


def test_the_last_token_can_be_drawn_and_no_other_one_after_it() -> None:
    found = _drawn(torch.zeros(7), 500)
    assert found.keys() == set(range(7))


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_parameters_that_cannot_be_are_named(parameters: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Sampling(**parameters)
