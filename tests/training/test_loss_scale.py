"""The factor of losses in float16."""

import math

import pytest

from swarm.training.scaling import GROWS_AFTER, MEAN_SCALE, MOST_DOUBLINGS, LossScale


def test_overflows_halve_the_factor_and_successes_in_a_row_double_it() -> None:
    scale = LossScale.of_means("fp16")
    assert scale.halve()
    assert scale.factor == MEAN_SCALE / 2
    for _ in range(GROWS_AFTER - 1):
        scale.succeeded()
    assert scale.factor == MEAN_SCALE / 2
    scale.succeeded()
    assert scale.factor == MEAN_SCALE


@pytest.mark.parametrize("scale", [LossScale.of_means("bf16"), LossScale.of_sums("off", 100)])
def test_other_types_have_no_factor(scale: LossScale) -> None:
    for _ in range(2 * GROWS_AFTER):
        scale.succeeded()
    assert scale.factor == 1.0
    assert scale.is_fixed
    assert not scale.halve()
    assert scale.factor == 1.0


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
