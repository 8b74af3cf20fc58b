"""Training without a swarm: which microbatches a step counts."""

import dataclasses

import torch

from scripts.benches.parity import Options, _config
from scripts.benches.shared.common import with_corpus
from scripts.benches.sides.reference import Reference


def test_the_reference_steps_on_the_mean_gradient_of_the_microbatches_that_count(text: str) -> None:
    """If all but one microbatch are left out, the step is that of a round of this microbatch alone, whether it counts
    once or twice."""
    config = _config(Options(dataset=text))
    config, data = with_corpus(
        dataclasses.replace(config, data=dataclasses.replace(config.data, held_out_fraction=0.05))
    )
    only_first = {index: 0 for index in range(1, config.microbatches_per_round)}
    once, twice, plain = (Reference(config, data) for _ in range(3))
    once.step(0, only_first)
    twice.step(0, {0: 2, **only_first})
    plain.step(0)
    for name, weight in once.weights.items():
        torch.testing.assert_close(twice.weights[name], weight)
    assert any(not torch.allclose(plain.weights[name], weight) for name, weight in once.weights.items())
