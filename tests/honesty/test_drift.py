"""Answers of peers whose weights have drifted apart: which of them are out of line."""

import math
from collections.abc import Callable, Mapping

import pytest
import torch

from swarm.honesty.drift import MOST_SEEN, Drift, Likeness


def _noisy(true: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """The tensor with noise of so large a share of its norm."""
    noise = torch.randn(true.shape, generator=torch.Generator().manual_seed(1000 + seed))
    noisy: torch.Tensor = true + share * noise * true.norm() / noise.norm()
    return noisy


def _tensor(seed: int) -> torch.Tensor:
    return torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(seed))


def _after(num_others: int, share: float) -> Drift:
    """What a peer knows that has checked an answer of each of so many others, which differ by this share."""
    drift = Drift()
    for number in range(num_others):
        told = _noisy(_tensor(number), share, number)
        drift.fault(f"other {number}", {"output": Likeness.of(told, _tensor(number))})
    return drift


LIES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "sign": torch.neg,
    "scaled": lambda true: 10.0 * true,
    "another": lambda true: true.flip(1),
    "random": lambda true: _noisy(torch.zeros_like(true), 0.0, 0) + _tensor(99),
}


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_honest_answers_are_in_line_however_far_peers_have_drifted(share: float) -> None:
    drift = _after(6, share)
    for number in range(10, 100):
        told = _noisy(_tensor(number), share, number)
        assert drift.fault(f"other {number % 7}", {"output": Likeness.of(told, _tensor(number))}) == ""


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_lies_are_not(lie: Callable[[torch.Tensor], torch.Tensor], share: float) -> None:
    told = lie(_noisy(_tensor(1), share, 1))
    assert _after(6, share).fault("liar", {"output": Likeness.of(told, _tensor(1))})


def test_of_too_few_others_nothing_can_be_told() -> None:
    lie = {"output": Likeness.of(-_tensor(1), _tensor(1))}
    drift = _after(1, 0.1)
    assert drift.fault("liar", lie) is None
    assert drift.fault("liar", lie) is None  # What it told before does not count.
    assert _after(2, 0.1).fault("liar", lie) == "its output has a cosine of -1.00 with what follows, usual is 0.99"


def test_a_minority_of_liars_has_nobody_found_wrong() -> None:
    for lie in LIES.values():
        drift = _after(4, 0.3)
        for liar in range(3):
            drift.fault(f"liar {liar}", {"output": Likeness.of(lie(_tensor(liar)), _tensor(liar))})
        honest = {"output": Likeness.of(_noisy(_tensor(9), 0.5, 9), _tensor(9))}
        assert drift.fault("other 9", honest) == ""


def test_directions_are_not_compared_where_honest_answers_hardly_agree() -> None:
    drift = _after(6, 4.0)
    odd = {"output": Likeness.of(4.0 * _tensor(7).flip(1), _tensor(7))}
    assert drift.fault("other 7", odd) == ""


def test_directions_are_those_of_what_a_stage_adds_unless_it_is_next_to_nothing() -> None:
    came, change = _tensor(1), 0.2 * _tensor(2)
    # Who passes on what came has added nothing.
    assert Likeness.of(came, came + change, came).cosine == 0.0
    assert Likeness.of(came, came + change).cosine > 0.9
    assert Likeness.of(came, came + 0.01 * change, came).cosine == pytest.approx(1.0, abs=1e-3)
    assert Likeness.of(3.0 * came, came, came).log_ratio == pytest.approx(math.log(3.0))


def test_what_all_texts_share_is_left_out_of_directions() -> None:
    shared = 10.0 * torch.ones(16)
    assert Likeness.of(shared + _tensor(1), shared + _tensor(2)).cosine < 0.1


def test_of_two_zeros_nothing_differs() -> None:
    assert Likeness.of(torch.zeros(1), torch.zeros(1)) == Likeness(1.0, 0.0)
    assert Likeness.of(torch.zeros(1), torch.ones(1)).cosine == 0.0


def test_peers_beyond_a_number_are_forgotten() -> None:
    drift = _after(1, 0.1)
    for _ in range(2):
        for number in range(MOST_SEEN + 1):
            drift.fault(f"new {number}", {"loss": Likeness(1.0, 0.0)})
    assert drift.fault("liar", {"output": Likeness.of(-_tensor(1), _tensor(1))}) is None


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_loss_that_is_no_number_makes_no_honest_one_look_wrong(number: float) -> None:
    def found(loss: float) -> Mapping[str, Likeness]:
        return {"loss": Likeness.of(torch.tensor([loss]), torch.tensor([2.0]))}

    drift = Drift()
    assert drift.fault("liar", found(number)) is None
    assert drift.fault("other", found(2.0)) is None
    assert drift.fault("third", found(2.1)) == ""
    assert drift.fault("liar", found(number)), "and is found wrong"
