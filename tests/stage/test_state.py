"""A stage's state as others get it, and which states of others are refused."""

import pytest
import torch

from swarm.errors import IntegrityError
from swarm.stage.state import digest_of
from swarm.stage.weights import StageWeights
from tests.stage.linear import accumulate, weights_in
from tests.support.commits import end_round, state_tensors


def test_a_state_is_a_copy() -> None:
    weights = weights_in("diloco")
    state, digest = state_tensors(weights), digest_of(weights.state())
    accumulate(weights, *range(2))
    end_round(weights, weights.contribute().tensors)
    assert digest_of(weights.state()) != digest
    weights.check(state, digest, round_number=0)


def _stepped(setting: str) -> StageWeights:
    """The weights after one round."""
    weights = weights_in(setting)
    average = {name: torch.ones_like(value) for name, value in weights.contribute().tensors.items()}
    end_round(weights, average, total_squared_norm=1.0)
    return weights


def test_a_state_of_another_digest_is_refused() -> None:
    weights = weights_in("diloco")
    state, digest = state_tensors(weights), digest_of(weights.state())
    with pytest.raises(IntegrityError, match="digest"):
        weights.check(state | {"anchor/bias": state["anchor/bias"] + 1}, digest, round_number=0)


@pytest.mark.parametrize(
    ("setting", "name", "wrong"),
    [
        ("diloco", "anchor/weight", None),
        ("diloco", "anchor/weight", torch.zeros(5, 5)),
        ("diloco", "anchor/more", torch.zeros(4)),
        ("diloco", "outer/more/momentum_buffer", torch.zeros(4)),
        ("diloco", "outer/bias/momentum_buffer", torch.zeros(3)),
        ("diloco", "outer/bias/exp_avg", torch.zeros(4)),
        ("synchronous", "outer/bias/step", None),
        ("synchronous", "outer/bias/step", torch.zeros(4)),
        ("synchronous", "outer/bias/exp_avg", None),
        ("synchronous", "outer/bias/exp_avg_sq", torch.zeros(2, 2)),
    ],
)
def test_a_state_of_other_tensors_is_refused(setting: str, name: str, wrong: torch.Tensor | None) -> None:
    weights = _stepped(setting)
    state = state_tensors(weights)
    weights.check(state, digest_of(state), round_number=1)
    state = {key: value for key, value in state.items() if key != name} | ({} if wrong is None else {name: wrong})
    with pytest.raises(IntegrityError, match="another model"):
        weights.check(state, digest_of(state), round_number=1)


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("diloco", "anchor/weight", float("nan")),
        ("diloco", "anchor/weight", float("inf")),
        ("diloco", "anchor/bias", -1e30),
        ("diloco", "outer/bias/momentum_buffer", float("-inf")),
        ("synchronous", "anchor/bias", float("nan")),
        ("synchronous", "outer/bias/exp_avg", float("nan")),
        ("synchronous", "outer/bias/exp_avg_sq", -1.0),
        ("synchronous", "outer/bias/exp_avg_sq", float("inf")),
        ("synchronous", "outer/bias/step", float("nan")),
        ("synchronous", "outer/bias/step", -1.0),
        ("synchronous", "outer/bias/step", 2.0),
    ],
)
def test_a_state_that_nobody_can_have_reached_is_refused(setting: str, name: str, value: float) -> None:
    """The digest matches the state, because the sender made both."""
    weights = _stepped(setting)
    state = state_tensors(weights)
    state[name].view(-1)[-1] = value
    with pytest.raises(IntegrityError, match=f"{name} of the state"):
        weights.check(state, digest_of(state), round_number=1)


def test_a_state_in_other_numbers_is_refused() -> None:
    weights = weights_in("diloco")
    state = {name: value.to(torch.bfloat16) for name, value in state_tensors(weights).items()}
    with pytest.raises(IntegrityError, match="in bfloat16"):
        weights.check(state, digest_of(state), round_number=0)
