"""What the bench `pipeline` refuses before it starts anything."""

from typing import Any

import pytest

from scripts.benches.pipeline import Options, _config


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"d_model": ()}, "--d-model names no width"),
        ({"d_model": (384, 0)}, "--d-model must be a multiple of 64, not 0"),
        ({"d_model": (100,)}, "--d-model must be a multiple of 64, not 100"),
        ({"d_model": (64,)}, "--num-layers must be at least 2 for two stages, not 1"),
        ({"num_layers": -1}, "--num-layers must be at least 2 for two stages, not -1"),
        ({"microbatches": 0}, "--microbatches must be at least 1, not 0"),
        ({"sampled": 0}, "--sampled must be at least 1, not 0"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Options(**changes)


@pytest.mark.parametrize(
    ("d_model", "num_layers", "microbatch_size", "round_samples"), [(384, 6, 8, 96), (768, 12, 4, 48)]
)
def test_a_width_has_its_layers_and_its_microbatches(
    d_model: int, num_layers: int, microbatch_size: int, round_samples: int
) -> None:
    config = _config(Options(), d_model)
    assert (config.model.num_layers, config.data.microbatch_size) == (num_layers, microbatch_size)
    assert config.rounds.round_samples == round_samples
    assert _config(Options(microbatch_size=1), d_model).rounds.round_samples == 12
