"""How the bench `parity` compares two runs."""

import math

import pytest
import torch

from scripts.benches.parity import BOUND, Trained, differences

EXACT = [1.0, 2.0, 4.0]


def _trained(losses: list[float], *peers: list[float]) -> Trained:
    """Each peer has three tensors."""
    weights = [{str(number): torch.tensor([value, 1.0]) for number, value in enumerate(peer)} for peer in peers]
    return Trained(losses=losses, weights=weights)


REFERENCE = _trained(EXACT, EXACT)


def test_the_largest_difference_of_any_step_and_any_tensor_counts() -> None:
    found = differences(_trained([1.0, 2.2, 4.0], EXACT, [1.0, 2.0, 4.0 + 17**0.5]), REFERENCE)
    assert found == {"max_loss_rel_diff": pytest.approx(0.1), "max_weight_rel_diff": pytest.approx(1.0)}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_passes(value: float, place: int) -> None:
    broken = [*EXACT[:place], value, *EXACT[place + 1 :]]
    for ours, theirs in ((broken, EXACT), (EXACT, broken)):
        found = differences(_trained(ours, EXACT, ours), _trained(theirs, theirs))
        assert min(found.values()) > BOUND
