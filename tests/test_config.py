"""The run's document: read strictly, told apart by its digest, compared by field."""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest

from swarm import config
from swarm.config import DataConfig, ModelConfig, RunConfig, StagesConfig
from swarm.errors import ConfigMismatch
from swarm.rpc.bounds import LONGEST_LIST

ROOT = Path(__file__).parents[1]


def test_toml_overrides_the_defaults() -> None:
    text = 'run = "r"\n[model]\nnum_layers = 5\n[stages]\nlayers_per_stage = [1, 2, 2]\n'
    expected = RunConfig(
        run="r", model=ModelConfig(num_layers=5), stages=StagesConfig(num_stages=3, layers_per_stage=(1, 2, 2))
    )
    assert config.from_toml(text, source="x.toml") == expected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[model]\nlayers = 3", "x.toml: unknown key 'model.layers'"),
        ("colour = 1", "x.toml: unknown key 'colour'"),
        ("[model]\nnum_layers = 0", "x.toml: model.num_layers must be at least 1, not 0"),
        (
            "[model]\nd_model = 100\nnum_heads = 3",
            "model.d_model (100) must be an even multiple of model.num_heads (3)",
        ),
        ("[model]\nnum_heads = 4\nnum_kv_heads = 3", "model.num_kv_heads (3) must divide model.num_heads (4)"),
        ("[model]\nnum_layers = 2", "stages.num_stages (3) must not exceed model.num_layers (2)"),
        ("[stages]\nlayers_per_stage = [4]", "stages.layers_per_stage has 1 entries for 3 stages"),
        ("[stages]\nlayers_per_stage = [1, 1, 1]", "stages.layers_per_stage adds up to 3, model.num_layers is 4"),
        (
            "[model]\ntied_embeddings = true\ncustom_class = 'a:B'",
            "model.tied_embeddings is not for a model.custom_class",
        ),
        (
            "[model]\nbottleneck_dim = 256",
            "model.bottleneck_dim must be at least 0 and below model.d_model (256), not 256",
        ),
        (
            "[model]\nbottleneck_dim = 16\ntied_embeddings = true",
            "model.tied_embeddings is not for model.bottleneck_dim",
        ),
        ("[model]\nbottleneck_dim = 16\ncustom_class = 'a:B'", "model.bottleneck_dim is for the built-in model"),
        (
            "[model]\nbottleneck_dim = 16\n[stages]\nlayers_per_stage = [2, 2, 0]",
            "stages.layers_per_stage must not end with 0 where there is a model.bottleneck_dim",
        ),
        ("[wire]\ndtype = 'int4'", "wire.dtype: Input should be"),
        ("[averaging]\nnum_fragments = 2", "averaging.num_fragments (2) must not exceed the layers of a stage (1)"),
        (
            "[model]\nnum_layers = 8\n[averaging]\nnum_fragments = 2\n[rounds]\nsetting = 'synchronous'",
            "is for rounds.setting = 'diloco' only",
        ),
        ("[averaging]\ntop_k = 6", "averaging.top_k must be a multiple of 4 between 4 and 1024, not 6"),
        ("[averaging]\nclip_to_median = 0.5", "averaging.clip_to_median must be 0 or at least 1, not 0.5"),
        ("[averaging]\nfeedback_decay = 2.0", "averaging.feedback_decay must be in [0, 1], not 2.0"),
        ("[averaging]\ngather_members = 0", "averaging.gather_members must be at least 1, not 0"),
        ("[averaging]\noverlap_steps = -1", "averaging.overlap_steps must not be negative, not -1"),
        ("[rounds]\nround_samples = 12", "rounds.round_samples (12) must be a multiple of data.microbatch_size (8)"),
        (
            "[rounds]\nsetting = 'synchronous'\nround_samples = 2097160",
            "rounds.round_samples (2097160) makes 262145 microbatches of data.microbatch_size (8), and a synchronous "
            "round has at most 262144",
        ),
        ("[rounds]\ninner_batch_samples = 12", "rounds.inner_batch_samples (12) must be a multiple of"),
        ("[optimizer]\nschedule = 'cosine'", "optimizer.schedule = 'cosine' needs optimizer.total_samples"),
        ("[optimizer]\nschedule = 'linear'", "optimizer.schedule = 'linear' needs optimizer.total_samples"),
        ("[optimizer]\nschedule = 'cosine-restarts'", "'cosine-restarts' needs optimizer.restart_samples"),
        ("[averaging]\ncodec = 'int3'", "averaging.codec: Input should be"),
        ("[data]\nheld_out_fraction = 1.0", "data.held_out_fraction must be between 0 and 1, not 1.0"),
        ("[data]\nseed = -1", "data.seed must be at least 0 and below 2^63, not -1"),
        (f"[data]\nseed = {1 << 63}", f"data.seed must be at least 0 and below 2^63, not {1 << 63}"),
        (
            f"[rounds]\nround_samples = {1 << 60}",
            f"rounds.round_samples must be at most {1 << 48}, not {1 << 60}",
        ),
        (f"[optimizer]\nwarmup_samples = {1 << 60}", f"optimizer.warmup_samples must be at most {1 << 48}, not"),
        (f"[model]\nvocab_size = {1 << 60}", f"model.vocab_size must be at most {1 << 48}, not"),
        ("[optimizer]\nlearning_rate = inf", "optimizer.learning_rate must be finite, not inf"),
        ("[optimizer]\nclip_norm = inf", "optimizer.clip_norm must be finite, not inf"),
        ("[outer]\nlearning_rate = nan", "outer.learning_rate must be finite, not nan"),
        ("[averaging]\nclip_to_median = inf", "averaging.clip_to_median must be finite, not inf"),
        ("[model]\nrope_theta = inf", "model.rope_theta must be finite, not inf"),
        ("[data]\ntokenizer_identity = 'x'", "data.tokenizer_identity must be 'bytes' or 64 hexadecimal digits, not"),
        ("run = 'a b'", "run must be 1 to 64 letters"),
        ("run = ", "x.toml is not valid TOML"),
    ],
)
def test_a_fault_is_one_line(text: str, line: str) -> None:
    with pytest.raises(ValueError, match=r"x\.toml") as fault:
        config.from_toml(text, source="x.toml")
    assert line in str(fault.value)
    assert "\n" not in str(fault.value)


def _fields() -> list[tuple[str, str, Any]]:
    """Every field of the configuration: its section (empty at the top), its name, and its default."""
    run = RunConfig()
    found = []
    for field in dataclasses.fields(run):
        value = getattr(run, field.name)
        if dataclasses.is_dataclass(value):
            found += [(field.name, inner.name, getattr(value, inner.name)) for inner in dataclasses.fields(value)]
        else:
            found.append(("", field.name, value))
    return found


@pytest.mark.parametrize(("section", "name", "default"), _fields())
def test_no_field_takes_another_type(section: str, name: str, default: Any) -> None:
    """Not even one that Python would turn into its own: `true` is no number, 1 no boolean, and "4" is not 4."""
    values = {bool: "true", int: "4", float: "0.5", str: "'4'", list: "[true]", dict: "{}", None: "1979-05-27"}
    wrong = [text for kind, text in values.items() if kind is not type(default)]
    if isinstance(default, float):
        wrong.remove("4")
    where = f"{section}.{name}" if section else name
    for text in wrong:
        with pytest.raises(ValueError, match=rf"^x\.toml: {where}(\.0)?: Input should be [^\n]*$"):
            config.from_toml(f"[{section}]\n{name} = {text}" if section else f"{name} = {text}", source="x.toml")


def test_a_whole_number_passes_for_a_float() -> None:
    assert repr(config.from_toml("[optimizer]\nlearning_rate = 1", source="x").optimizer.learning_rate) == "1.0"


def test_the_largest_seed_is_one_that_torch_and_numpy_take() -> None:
    seed = (1 << 63) - 1
    assert config.from_toml(f"[data]\nseed = {seed}", source="x").data.seed == seed


def test_synchronous_rounds_have_no_inner_batch() -> None:
    text = "[rounds]\nsetting = 'synchronous'\ninner_batch_samples = 3"
    assert config.from_toml(text, source="x").rounds.synchronous


def test_the_largest_synchronous_round_can_be_reported() -> None:
    text = "[rounds]\nround_samples = 2097152\nsetting = "
    run = config.from_toml(text + "'synchronous'", source="x")
    assert run.microbatches_per_round == LONGEST_LIST, "what a list may have"
    config.from_toml(text.replace("52", "60") + "'diloco'", source="x")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the configuration .*none.toml: No such file"):
        config.load(tmp_path / "none.toml")


def test_a_binary_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="it is not UTF-8 text"):
        config.load(tmp_path / "x.toml")


@pytest.mark.parametrize("name", ["tiny", "small", "llama-124m"])
def test_presets_load(name: str) -> None:
    assert config.load_preset(name).run == name


def test_an_unknown_preset_names_the_known_ones() -> None:
    known = "llama-124m, small, sparseloco, targon, tiny"
    with pytest.raises(ValueError, match=f"unknown preset 'huge'; the presets are {known}"):
        config.load_preset("huge")


def test_json_is_canonical() -> None:
    run = config.load_preset("tiny")
    again = config.from_json(config.to_json(run), source="DHT")
    assert again == run
    assert again.digest == run.digest


@pytest.mark.parametrize("text", ["{", "[]", '{"run": 3}', '{"x": 1}', "[" * 12000, "1" * 5000])
def test_wrong_json_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^the run's configuration[^\n]*$"):
        config.from_json(text, source="the run's configuration")


def test_every_field_is_part_of_the_digest() -> None:
    run = RunConfig()
    assert dataclasses.replace(run, data=DataConfig(seed=1)).digest != run.digest
    assert dataclasses.replace(run, data=DataConfig(seed=1)).run_id != run.run_id


def test_a_mismatch_names_the_field_and_both_values() -> None:
    with pytest.raises(ConfigMismatch, match=r"data.seed is 0 here and 1 in the run; leave --config and --preset out"):
        config.check_same(RunConfig(), RunConfig(data=DataConfig(seed=1)))


def test_another_tokenizer_is_named_before_the_text_that_it_makes() -> None:
    ours = DataConfig(tokenizer="x.json", tokenizer_identity="ab" * 32, digest="cd" * 32)
    theirs = dataclasses.replace(ours, tokenizer_identity="ef" * 32, digest="01" * 32)
    with pytest.raises(ConfigMismatch, match=r"^data.tokenizer_identity is 'abab"):
        config.check_same(RunConfig(data=ours), RunConfig(data=theirs))


def test_equal_configurations_agree() -> None:
    config.check_same(RunConfig(), RunConfig())


def test_defaults_are_resolved() -> None:
    model = ModelConfig(d_model=128, num_heads=4)
    assert (model.kv_heads, model.feed_forward_width) == (4, 352)
    assert ModelConfig(num_kv_heads=2, d_ff=10).kv_heads == 2
    assert DataConfig(microbatch_size=4, sequence_length=16).tokens_per_microbatch == 64
    assert RunConfig().microbatches_per_round == 32


def test_the_page_about_it_is_current() -> None:
    """docs/configuration.md tells of every field; scripts/generate_config_docs writes it."""
    script: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "generate_config_docs"))
    assert (ROOT / "docs" / "configuration.md").read_text() == script["page"](), "run scripts/generate_config_docs"
