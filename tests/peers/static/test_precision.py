"""The scale of losses in float16."""

import math

import pytest

from peers.static.precision import FIRST_SCALE, GROWS_AFTER, LossScale
from swarm.errors import Fatal


def test_overflows_halve_the_scale_and_good_steps_in_a_row_double_it() -> None:
    scale = LossScale("fp16")
    assert not scale.accepts(math.inf, 0)
    assert scale.factor == FIRST_SCALE / 2
    for step in range(1, GROWS_AFTER):
        assert scale.accepts(1.0, step)
    assert scale.factor == FIRST_SCALE / 2
    assert scale.accepts(1.0, GROWS_AFTER)
    assert scale.factor == FIRST_SCALE


@pytest.mark.parametrize("dtype", [None, "fp32", "bf16"])
def test_other_types_have_no_scale(dtype: str | None) -> None:
    scale = LossScale(dtype)
    for step in range(2 * GROWS_AFTER):
        assert scale.accepts(1.0, step)
    assert scale.factor == 1.0
    with pytest.raises(Fatal, match=r"the gradient of step 7 is not finite: take a smaller optimizer.learning_rate$"):
        scale.accepts(math.nan, 7)


def test_a_training_that_has_diverged_ends_in_float16_too() -> None:
    """Its gradients overflow at every scale, so halving the scale again and again must end with an error."""
    scale, step = LossScale("fp16"), 0
    while scale.factor > 1.0:
        assert not scale.accepts(math.nan, step)
        step += 1
    assert step == math.log2(FIRST_SCALE)
    with pytest.raises(Fatal, match=r"is not finite: take a smaller optimizer.learning_rate, or --dtype bf16$"):
        scale.accepts(math.nan, step)
