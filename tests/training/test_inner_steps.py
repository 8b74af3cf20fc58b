"""Which figures of inner steps are worth a warning."""

import pytest

from swarm.training.inner_steps import InnerSteps


def _steps(*, samples: int = 16, staleness: int = 0) -> InnerSteps:
    """Ten steps of two microbatches each, of which the second has this staleness."""
    steps = InnerSteps(configured_samples=16)
    for number in range(10, 20):
        steps.add(samples, {number: 1, number - staleness: 1} if staleness else {number: 2}, newest=number)
    return steps


@pytest.mark.parametrize("steps", [_steps(), _steps(samples=24), _steps(staleness=2), InnerSteps(), _steps(samples=8)])
def test_what_is_about_right_is_not_warned_of(steps: InnerSteps) -> None:
    assert steps.fault == ""


@pytest.mark.parametrize("samples", [7, 45])
def test_steps_of_far_other_samples_than_configured_are_named(samples: int) -> None:
    assert _steps(samples=samples).fault == (
        f"inner steps took {samples} samples, and rounds.inner_batch_samples is 16"
    )


def test_late_gradients_are_named_with_what_to_change() -> None:
    assert _steps(staleness=3).fault.startswith("gradients were 1.5 inner steps late on average, 3 at most")
    assert "lower rounds.max_staleness" in _steps(staleness=3).fault
