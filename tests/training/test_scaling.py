"""Clipping: the norm, the factor, and what is scaled; and the factor of losses in float16."""

import math

import pytest
import torch

from swarm.machine.memory import Recycler
from swarm.training.scaling import (
    GROWS_AFTER,
    MEAN_SCALE,
    MOST_DOUBLINGS,
    LossScale,
    clip,
    clip_factor,
    clipped,
    squared_norm_of,
    squared_norm_of_vector,
)


def test_the_squared_norm_is_over_everything_and_in_double_precision() -> None:
    assert squared_norm_of([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]) == pytest.approx(25.0)
    assert squared_norm_of([torch.full((4,), 1e25)]) == pytest.approx(4e50)
    assert squared_norm_of([]) == 0.0


@pytest.mark.parametrize("length", [0, 5, 4096, 10_000])
def test_the_squared_norm_of_a_vector_is_the_same(length: int) -> None:
    vector = torch.randn(length, generator=torch.Generator().manual_seed(0))
    assert squared_norm_of_vector(vector) == pytest.approx(squared_norm_of([vector]), rel=1e-5)
    assert not math.isfinite(squared_norm_of_vector(torch.cat([vector, torch.tensor([math.nan])])))


@pytest.mark.parametrize(
    ("norm", "limit", "factor"), [(2.0, 1.0, 0.5), (0.5, 1.0, 1.0), (9.0, 0.0, 1.0), (0.0, 1.0, 1.0)]
)
def test_clip_factor(norm: float, limit: float, factor: float) -> None:
    assert clip_factor(norm**2, limit) == pytest.approx(factor)


@pytest.mark.parametrize("max_norm", [0.25, 1000.0])
def test_clipped_gradients_have_the_largest_norm_at_most(max_norm: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(shape, generator=generator) for name, shape in (("weight", (3, 4)), ("bias", (4,)))}
    originals, squared_norm = {name: g.clone() for name, g in gradients.items()}, squared_norm_of(gradients.values())
    elsewhere = clipped(gradients, squared_norm, max_norm, Recycler())
    assert all(torch.equal(gradients[name], originals[name]) for name in gradients), "others may still read these"
    in_place = {name: 8.0 * gradient for name, gradient in gradients.items()}
    clip(in_place, squared_norm, max_norm, scale=8.0)
    expected = min(max_norm, math.sqrt(squared_norm))
    for result in (elsewhere, in_place):
        assert math.sqrt(squared_norm_of(result.values())) == pytest.approx(expected)


# -- the factor of losses in float16 -----------------------------------------------------------------------------------


def test_overflows_halve_the_factor_and_successes_in_a_row_double_it() -> None:
    scale = LossScale.of_means("fp16")
    assert scale.halve()
    assert scale.factor == MEAN_SCALE / 2
    for _ in range(GROWS_AFTER - 1):
        scale.succeeded()
    assert scale.factor == MEAN_SCALE / 2
    scale.succeeded()
    assert scale.factor == MEAN_SCALE


def test_the_factor_of_a_sum_is_a_power_of_two_within_bounds() -> None:
    scale = LossScale.of_sums("fp16", 100)
    first = scale.factor
    assert first == 2.0 ** math.floor(math.log2(MEAN_SCALE / 100))
    for _ in range((MOST_DOUBLINGS + 2) * GROWS_AFTER):
        scale.succeeded()
    assert scale.factor == first * 2**MOST_DOUBLINGS


def test_what_no_factor_mends_leaves_the_factor_as_it_was() -> None:
    """Else a neighbour's single gradient would lower the factor for all that come after it."""
    scale = LossScale.of_sums("fp16", 100)
    scale.succeeded()
    before, num_tries = scale.factor, 1
    while scale.halve():
        num_tries += 1
    assert scale.factor == before
    assert num_tries == MOST_DOUBLINGS + 1
