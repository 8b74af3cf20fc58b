"""The causes bench: that rows differ in one thing, see the same samples, and that a late gradient is one step late."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from scripts.benches.causes import MEAN, ROWS, Delayed, Options, Row, run_config, summary, train
from scripts.benches.shared.common import with_corpus
from scripts.benches.sides.reference import Reference
from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches

NUM_STEPS = 3
CHANGES = {"two_workers": 3}
"""Two workers share a step's samples, and there is a number of steps between two averages."""


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """A small text and a small model."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} bottles\n" for number in range(3000)))
    return Options(dataset=str(text), d_model=32, num_layers=1, iterations=100, seeds=1)


def _single(options: Options) -> tuple[RunConfig, Microbatches]:
    return with_corpus(run_config(options, ROWS["single"], 0))


def test_rows_differ_in_one_thing_from_a_row_that_comes_before() -> None:
    names = list(ROWS)
    for name, row in ROWS.items():
        if name == "single":
            continue
        assert names.index(row.against) < names.index(name)
        values, others = dataclasses.asdict(row), dataclasses.asdict(ROWS[row.against])
        assert len([key for key in values if values[key] != others[key] and key != "against"]) == CHANGES.get(name, 1)


def test_all_rows_see_the_same_samples(options: Options) -> None:
    for name, row in ROWS.items():
        config = run_config(options, row, 2)
        assert config.optimizer.total_samples % config.rounds.round_samples == 0, name
        assert (config.data.seed, config.optimizer.total_samples) == (2, 12 * options.iterations)


def test_a_late_gradient_is_of_the_weights_before_the_last_step(options: Options) -> None:
    config, data = _single(options)
    delayed, reference = Delayed(config, data, corrected=False), Reference(config, data)
    seen = [{name: value.clone() for name, value in reference.weights.items()}]
    for number in range(NUM_STEPS):
        delayed.step(number)
        # The reference computes gradients with the weights before the last step, and applies them to the newest
        # weights.
        newest = seen[-1]
        reference.load(seen[max(0, number - 1)])
        size = config.microbatches_per_round
        reference.accumulate_mean(dict.fromkeys(range(number * size, (number + 1) * size), 1))
        reference.load(newest)
        reference.update(number)
        seen.append({name: value.clone() for name, value in reference.weights.items()})
    for name, value in delayed.weights.items():
        assert torch.equal(value, seen[-1][name])


def test_a_correction_repeats_by_how_much_a_step_differs_from_the_last_one(options: Options) -> None:
    """So the first step has no correction. The second one is the step with late gradients, plus its difference from the
    first one."""
    config, data = _single(options)
    late, corrected = Delayed(config, data, corrected=False), Delayed(config, data, corrected=True)
    start = {name: value.clone() for name, value in late.weights.items()}
    late.step(0)
    corrected.step(0)
    first = {name: value.clone() for name, value in late.weights.items()}
    assert all(torch.equal(value, first[name]) for name, value in corrected.weights.items())
    late.step(1)
    corrected.step(1)
    for name, value in corrected.weights.items():
        plain = late.weights[name]
        torch.testing.assert_close(value, plain + (plain - first[name]) - (first[name] - start[name]))


def test_a_share_is_taken_seed_by_seed() -> None:
    found = summary({"single": [2.0, 4.0], "muon": [1.9, 4.0], "delay_corrected": [2.1, 4.0]})
    assert found["muon"]["share"] == pytest.approx(-0.025)
    assert found["muon"]["loss"] == pytest.approx(2.95)
    assert "share" not in found["single"]
    assert "share" not in summary({"muon": [2.0]})["muon"]


def test_a_row_of_workers_trains(options: Options) -> None:
    row = Row(workers=2, batch=6, steps=50, outer=MEAN)
    assert train(row, run_config(options, row, 0)) < math.log(256) - 1


def test_unknown_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="--rows: 'drift' is none of single, "):
        Options(rows=("drift",))
