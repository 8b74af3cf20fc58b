"""The learning bench: what it compares, what its figures mean, and that plain training is what it says."""

import dataclasses

import pytest
import torch

from scripts.benches.learning import Options, run_config, single_config, summary
from scripts.benches.shared.common import with_corpus
from scripts.benches.sides.plain_training import PlainDiloco
from scripts.benches.sides.reference import Reference
from swarm.config import OuterConfig


def _options(text: str) -> Options:
    return Options(dataset=text, d_model=32, num_layers=2)


def test_figures_are_means_over_the_seeds_and_ratios_to_plain_training_of_the_same_seed() -> None:
    plain = [[(80, 8.0, 2.0), (100, 10.0, 1.9)], [(80, 16.0, 3.0), (100, 20.0, 2.9)]]
    swarm = [[(80, 8.0, 2.2), (100, 10.0, 1.8)], [(80, 16.0, 3.0), (100, 20.0, 2.0)]]
    found = summary(swarm, plain)
    assert found["final_loss"] == pytest.approx(1.9)
    assert found["seconds_to_loss_by_seed"] == pytest.approx([9.0 / 8.0, 1.0])
    never = [[(80, 8.0, 2.2), (100, 10.0, 2.1)], swarm[1]]
    assert summary(never, plain)["seconds_to_loss"] is None


@pytest.mark.slow
def test_plain_diloco_of_one_worker_that_takes_its_mean_is_plain_adamw(text: str) -> None:
    """With an outer rate of one and no momentum, the outer step results in the worker's own weights."""
    mean = OuterConfig(learning_rate=1.0, momentum=0.0)
    config, data = with_corpus(dataclasses.replace(run_config(_options(text), "diloco", 0), outer=mean))
    diloco, adamw = PlainDiloco(config, data, 1), Reference(single_config(config), data)
    diloco.step(0)
    for number in range(config.rounds.round_samples // config.rounds.inner_batch_samples):
        adamw.step(number)
    for name, value in adamw.weights.items():
        torch.testing.assert_close(diloco.weights[name], value, rtol=0, atol=1e-5)
