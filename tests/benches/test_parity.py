"""How the bench `parity` compares two runs."""

import dataclasses
import math
from typing import cast

import pytest
import torch

from scripts.benches.parity import BOUND, Trained, differences
from scripts.benches.sides.reference import Reference, model_of_paths
from swarm.config import RunConfig, StagesConfig
from swarm.data.microbatches import Microbatches
from swarm.training.samples import TOKENS
from tests.support.chain import SYNCHRONOUS, tokens

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


class _Text:
    """Microbatches of one text, or of one for each of two paths: index `i` has `texts[i % len(texts)]`."""

    def __init__(self, *texts: int) -> None:
        self._texts = texts

    def samples(self, index: int) -> dict[str, torch.Tensor]:
        return {TOKENS: tokens(SYNCHRONOUS, self._texts[index % len(self._texts)])}


def _reference(config: RunConfig, *texts: int) -> Reference:
    data = cast(Microbatches, _Text(*texts))
    reference = Reference(config, data, model_of_paths(config) if config.stages.variants else None)
    for number in range(2):
        reference.step(number)
    return reference


def test_each_block_of_the_reference_learns_from_the_mean_over_its_own_microbatches() -> None:
    # The norm by which gradients are clipped is over all variants, so nothing is clipped here.
    plain = dataclasses.replace(SYNCHRONOUS, optimizer=dataclasses.replace(SYNCHRONOUS.optimizer, clip_norm=1e6))
    paths = dataclasses.replace(plain, stages=StagesConfig(num_stages=3, variants=(1, 2, 1)))
    one, both = _reference(plain, 7), _reference(paths, 7)
    assert len(both.weights) > len(one.weights)
    for name, weight in both.weights.items():
        torch.testing.assert_close(weight, one.weights[name.partition("@")[0]], rtol=0, atol=1e-5)
    different = _reference(paths, 7, 8).weights
    (name,) = [name for name in different if name.endswith("attention.output.weight@1.1")]
    assert not torch.allclose(different[name], different[name.partition("@")[0]], atol=1e-4)
