"""Sizes that a run leaves out fit its model, its stages and its text."""

import dataclasses
from typing import Any

import pytest

from swarm.config import DataConfig, ModelConfig, RoundsConfig, RunConfig, Setting, StagesConfig, TextSize

MODELS = {
    "SmolLM2-135M": ModelConfig(num_layers=30, d_model=576, num_heads=9, num_kv_heads=3, max_positions=8192),
    "Llama-3-8B": ModelConfig(num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, d_ff=14336),
    "short": ModelConfig(max_positions=100),
}


def _open(model: str, setting: Setting = "diloco", num_stages: int = 2, **given: int) -> RunConfig:
    """A run that leaves out all sizes but those given."""
    sizes: dict[str, Any] = {"sequence_length": 0, "microbatch_size": 0, "round_samples": 0, "inner_batch_samples": 0}
    sizes |= given
    rounds = RoundsConfig(
        setting=setting, **{name: sizes.pop(name) for name in ("round_samples", "inner_batch_samples")}
    )
    stages = StagesConfig(num_stages=num_stages)
    return RunConfig(model=MODELS[model], stages=stages, data=DataConfig(**sizes), rounds=rounds)


def _text(tokens: int) -> TextSize:
    return TextSize(samples=tokens, sample_tokens=1)


def _sizes(config: RunConfig) -> tuple[int, int, int, int]:
    data, rounds = config.data, config.rounds
    return data.sequence_length, data.microbatch_size, rounds.inner_batch_samples, rounds.round_samples


@pytest.mark.parametrize(
    ("config", "tokens", "expected"),
    [
        (_open("SmolLM2-135M"), 10**9, (1024, 4, 16, 256)),
        (_open("SmolLM2-135M"), 450_000, (1024, 4, 16, 64)),  # about 2 MB
        (_open("SmolLM2-135M"), 75_000, (1024, 1, 4, 16)),  # about 300 kB
        (_open("SmolLM2-135M", num_stages=4), 10**9, (1024, 2, 16, 256)),
        (_open("SmolLM2-135M", "synchronous"), 10**9, (1024, 4, 16, 32)),
        (_open("SmolLM2-135M", "synchronous"), 75_000, (1024, 1, 16, 4)),
        (_open("Llama-3-8B"), 10**9, (1024, 1, 16, 256)),
        # What is given stays, and the rest fits it.
        (_open("SmolLM2-135M", microbatch_size=3), 10**9, (1024, 3, 12, 192)),
        (_open("SmolLM2-135M", microbatch_size=32), 75_000, (1024, 32, 32, 128)),
        (_open("SmolLM2-135M", "synchronous", round_samples=12), 10**9, (1024, 2, 16, 12)),
    ],
)
def test_they_fit_the_model_and_the_text(config: RunConfig, tokens: int, expected: tuple[int, int, int, int]) -> None:
    begun = config.begun(100, _text(tokens))
    assert _sizes(begun) == expected
    assert not begun.lacks_sizes
    # Steps are counted in the rounds that were chosen.
    assert begun.optimizer.total_samples == 100 * begun.rounds.round_samples
    assert begun.begun(7, _text(1)) == begun
    # A small stage's microbatches take less than 2 GiB of a GPU, and a large one computes its layers again.
    assert begun.model.gradient_checkpointing == (config.model == MODELS["Llama-3-8B"])


@pytest.mark.parametrize(
    ("packing", "text", "length"),
    [
        (True, TextSize(samples=600, sample_tokens=1024, longest=1024), 1024),
        (True, TextSize(samples=5, sample_tokens=1024, longest=88), 128),
        (False, TextSize(samples=600, sample_tokens=88, longest=88), 88),
    ],
)
def test_samples_are_no_longer_than_documents_have_use_for(packing: bool, text: TextSize, length: int) -> None:
    config = _open("SmolLM2-135M")
    data = dataclasses.replace(config.data, dataset="talks.jsonl", format="chat", packing=packing)
    begun = dataclasses.replace(config, data=data).begun(text=text)
    assert begun.data.sequence_length == length
    num_samples = text.samples * text.sample_tokens // length
    assert num_samples // begun.rounds.inner_batch_samples >= 4


def test_learned_bottlenecks_are_where_the_stages_of_the_first_peer_end() -> None:
    model = ModelConfig(num_layers=6, bottleneck_dim=8, bottleneck="learned")
    config = RunConfig(model=model, stages=StagesConfig(num_stages=3))
    assert config.lacks_sizes
    begun = config.begun()
    assert begun.model.bottleneck_layers == (2, 4)
    assert not begun.lacks_sizes
    assert begun.begun() == begun
    for layers in ((6,), (2, 4), (4, 2), (2, 2, 2), (2, 0, 4)):
        again = dataclasses.replace(begun, stages=StagesConfig(num_stages=len(layers), layers_per_stage=layers))
        assert again.begun().model == begun.model
    for others in ((3, 3), (0, 6), (2, 2, 1, 1)):
        with pytest.raises(ValueError, match=r"this model's stages end after layers 2, 4 only"):
            dataclasses.replace(begun, stages=StagesConfig(num_stages=len(others), layers_per_stage=others))
    with pytest.raises(ValueError, match=r"there is one stage: give model.bottleneck_layers"):
        dataclasses.replace(config, stages=StagesConfig(num_stages=1)).begun()
