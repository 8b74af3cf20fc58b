"""Training without a swarm: which microbatches a step counts."""

import dataclasses
from pathlib import Path

import pytest
import torch

from scripts.benches.parity import Options, _config
from scripts.benches.shared.common import with_corpus
from scripts.benches.sides.reference import Reference
from swarm.config import RunConfig


@pytest.fixture
def run_config(tmp_path: Path) -> RunConfig:
    """The parity bench's run, on a small text of its own."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} bottles\n" for number in range(3000)))
    config = _config(Options(dataset=str(text)))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, held_out_fraction=0.05))


def test_the_reference_steps_on_the_mean_gradient_of_the_microbatches_that_count(run_config: RunConfig) -> None:
    """If all but one microbatch are left out, the step is that of a round of this microbatch alone, whether it counts
    once or twice."""
    config, data = with_corpus(run_config)
    only_first = {index: 0 for index in range(1, config.microbatches_per_round)}
    once, twice, plain = (Reference(config, data) for _ in range(3))
    once.step(0, only_first)
    twice.step(0, {0: 2, **only_first})
    plain.step(0)
    for name, weight in once.weights.items():
        torch.testing.assert_close(twice.weights[name], weight)
    assert any(not torch.allclose(plain.weights[name], weight) for name, weight in once.weights.items())
