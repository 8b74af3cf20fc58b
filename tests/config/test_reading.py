"""TOML, JSON and presets: a fault is one line."""

import re

import pytest

from swarm import config
from swarm.config import RunConfig


def test_settings_are_written_as_in_toml_and_a_word_needs_no_quotes() -> None:
    changed = config.with_settings(
        RunConfig(run="r"),
        [
            "optimizer.learning_rate=1e-4", "optimizer.adjust_lr_fn = original", "model.num_layers=5", "run='s'",
            "stages.layers_per_stage=[1, 2, 2]", "stages.num_stages=3", "data.dataset=hf:NAME", "model.qk_norm=true",
        ],
    )  # fmt: skip
    text = """
        run = "s"
        optimizer = {learning_rate = 1e-4, adjust_lr_fn = "original"}
        model = {num_layers = 5, qk_norm = true}
        stages = {num_stages = 3, layers_per_stage = [1, 2, 2]}
        data = {dataset = "hf:NAME"}
    """
    assert changed == config.from_toml(text, source="x.toml")
    assert config.with_settings(changed, []) is changed


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("optimizer.lr=1", "--set: unknown key 'optimizer.lr'; optimizer has adjust_lr_fn, "),
        (
            "optimizer.learningrate=1",
            "--set: unknown key 'optimizer.learningrate'; did you mean optimizer.learning_rate",
        ),
        ("optimizer.learning_rate=-1", "--set: optimizer.learning_rate must not be negative, not -1.0"),
        ("stages.layers_per_stage=[1", "--set stages.layers_per_stage: [1 is not valid TOML"),
        ("model.num_layers", "--set takes SECTION.KEY=VALUE, such as optimizer.learning_rate=1e-4, not 'model.num_la"),
        ("model.num_layers=" + "[" * 100_000, "--set model.num_layers: [["),
    ],
)
def test_a_setting_is_checked_like_the_file(setting: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(complaint)}") as caught:
        config.with_settings(RunConfig(), [setting])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", config.preset_names())
def test_presets_load(name: str) -> None:
    preset = config.read_preset(name)
    found = config.with_settings(config.RunConfig(), preset.settings)
    assert found.run == name
    if preset.begins_with:
        assert preset.needs_text
        with pytest.raises(ValueError, match=f"preset {name} begins with a model, {preset.begins_with}"):
            config.load_preset(name)
    else:
        assert config.load_preset(name) == found
    # What is too small for a tokenizer is for bytes.
    assert found.data.tokenizer != "bytes" or found.model.vocab_size == 256


@pytest.mark.parametrize("text", ["{", "[]", '{"run": 3}', '{"x": 1}', "[" * 12000, "1" * 5000])
def test_wrong_json_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^the run's configuration[^\n]*$"):
        config.from_json(text, source="the run's configuration")
