"""TOML, JSON and presets: a fault is one line."""

import re
from pathlib import Path

import pytest

from swarm import config
from swarm.config import ModelConfig, RunConfig, StagesConfig


def test_toml_overrides_the_defaults() -> None:
    text = 'run = "r"\n[model]\nnum_layers = 5\n[stages]\nlayers_per_stage = [1, 2, 2]\n'
    expected = RunConfig(
        run="r", model=ModelConfig(num_layers=5), stages=StagesConfig(num_stages=3, layers_per_stage=(1, 2, 2))
    )
    assert config.from_toml(text, source="x.toml") == expected


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
        ("optimiser.learning_rate=1", "--set: unknown key 'optimiser'; did you mean optimizer?"),
        ("learning_rate=1", "--set: unknown key 'learning_rate'; did you mean optimizer.learning_rate or outer.l"),
        ("model.sequence_length=1", "--set: unknown key 'model.sequence_length'; did you mean data.sequence_length?"),
        ("a.b.c=1", "--set: unknown key 'a.b'; a configuration has run, owner, revoked, model, "),
        ("optimizer.learning_rate=-1", "--set: optimizer.learning_rate must not be negative, not -1.0"),
        ("optimizer.learning_rate=fast", "--set: optimizer.learning_rate: Input should be a valid number"),
        ("model.num_layers=4.5", "--set: model.num_layers: Input should be a valid integer"),
        ("stages.layers_per_stage=[1", "--set stages.layers_per_stage: [1 is not valid TOML"),
        ("model.num_layers", "--set takes SECTION.KEY=VALUE, such as optimizer.learning_rate=1e-4, not 'model.num_la"),
        ("run.x=1", "--set takes SECTION.KEY=VALUE"),
        ("=1", "--set takes SECTION.KEY=VALUE"),
        ("model.num_layers=" + "[" * 100_000, "--set model.num_layers: [["),
    ],
)
def test_a_setting_is_checked_like_the_file(setting: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(complaint)}") as caught:
        config.with_settings(RunConfig(), [setting])
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the configuration .*none.toml: No such file"):
        config.load(tmp_path / "none.toml")


def test_a_binary_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="it is not UTF-8 text"):
        config.load(tmp_path / "x.toml")


def test_a_file_of_an_editor_on_windows_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b'\xef\xbb\xbfrun = "r"\r\n[model]\r\nnum_layers = 5\r\n')
    assert config.load(tmp_path / "x.toml") == config.from_toml('run = "r"\n[model]\nnum_layers = 5', source="y.toml")


def test_too_deep_a_file_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^x\.toml is not valid TOML: it is nested too deeply$"):
        config.from_toml("a = " + "[" * 100_000, source="x.toml")


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


def test_an_unknown_preset_names_the_known_ones() -> None:
    known = ", ".join(config.preset_names())
    with pytest.raises(ValueError, match=f"unknown preset 'huge'; the presets are {known}"):
        config.load_preset("huge")


@pytest.mark.parametrize("text", ["{", "[]", '{"run": 3}', '{"x": 1}', "[" * 12000, "1" * 5000])
def test_wrong_json_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^the run's configuration[^\n]*$"):
        config.from_json(text, source="the run's configuration")
