"""What the sections hold and refuse, each by itself and beside the others."""

import dataclasses
from typing import Any

import pytest

from swarm import config
from swarm.config import RunConfig


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[model]\nlayers = 3", "x.toml: unknown key 'model.layers'"),
        ("[model]\nnum_layers = 0", "x.toml: model.num_layers must be at least 1, not 0"),
        (
            "[model]\nd_model = 100\nnum_heads = 3",
            "model.d_model (100) must be an even multiple of model.num_heads (3)",
        ),
        ("[model]\nnum_heads = 4\nnum_kv_heads = 3", "model.num_kv_heads (3) must divide model.num_heads (4)"),
        ("[model]\nnum_layers = 2", "stages.num_stages (3) must not exceed model.num_layers (2)"),
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
        (
            "[model]\nbottleneck_dim = 16\n[stages]\nlayers_per_stage = [2, 2, 0]",
            "stages.layers_per_stage must not end with 0 where there is a model.bottleneck_dim",
        ),
        (
            "[model]\nbottleneck_dim = 16\nbottleneck_layers = [2]",
            "model.bottleneck_layers is for learned and anchored bottlenecks",
        ),
        *(
            (
                f"[model]\nbottleneck_dim = 16\nbottleneck = 'learned'\nbottleneck_layers = [{after}]",
                "model.bottleneck_layers must be numbers that rise, above 0 and below model.num_layers (4)",
            )
            for after in ("0, 2", "2, 4", "3, 1", "2, 2")
        ),
        (
            "[model]\nbottleneck_dim = 16\nbottleneck = 'learned'\nbottleneck_layers = [1, 2]",
            "stages.layers_per_stage would end stages after layers 3, and this model's stages end after layers 1, 2 ",
        ),
        (
            f"[model]\nbottleneck_dim = 16\nbottleneck = 'learned'\nweights = '{64 * 'a'}'",
            "model.bottleneck = 'learned' is for weights that are drawn",
        ),
        (
            "[model]\neos_token_ids = [1, 256]",
            "model.eos_token_ids must be at least 0 and below model.vocab_size (256), not 256",
        ),
        (f"[model]\neos_token_ids = {[0] * 65}", "model.eos_token_ids must name at most 64 tokens, not 65"),
        ("[model]\nnum_shards = 2", "model.num_shards is for layers that have model.block_types"),
        ("[model]\nnum_shards = 2\nblock_types = ['tp', 'tp', 'spd']", "model.block_types has 3 entries for 4 layers"),
        (
            "[model]\nnum_shards = 2\nblock_types = ['tp', 'tp', 'dp', 'spd']",
            "model.block_types: there is no 'dp', only tp, spd, parallel",
        ),
        (
            "[model]\nnum_shards = 3\nblock_types = 'spd'",
            "model.num_heads (4) must be a multiple of model.num_shards (3)",
        ),
        (
            "[model]\nnum_shards = 4\nblock_types = 'spd'\nnum_kv_heads = 2",
            "model.num_kv_heads (2) must be a multiple of model.num_shards (4)",
        ),
        (
            "[model]\nnum_shards = 2\nblock_types = 'spd'\nbottleneck_dim = 16",
            "model.block_types is not for a model with a model.bottleneck_dim",
        ),
        (
            "[model]\nnum_shards = 2\nblock_types = 'spd'\n[lora]\nrank = 2\nbase = 'nf4'",
            "lora.base = 'nf4' is not for a model with model.block_types",
        ),
        ("[model]\nversions = 'bf16'\n[lora]\nrank = 2", "model.versions = 'bf16' is for weights that are trained"),
        (
            "[model]\nnum_shards = 2\nblock_types = 'spd'\ncustom_class = 'a:B'",
            "model.block_types is not for a model with a model.custom_class",
        ),
        ("[wire]\ndtype = 'int4'", "wire.dtype: Input should be"),
        ("[averaging]\nnum_fragments = 2", "averaging.num_fragments (2) must not exceed the layers of a stage (1)"),
        (
            "[model]\nnum_layers = 8\n[averaging]\nnum_fragments = 2\n[rounds]\nsetting = 'synchronous'",
            "is for rounds.setting = 'diloco' only",
        ),
        ("[averaging]\ntop_k = 6", "averaging.top_k must be a multiple of 4 between 4 and 1024, not 6"),
        (
            "[averaging]\ngroup_size = 8\ncodec = 'int8'",
            "averaging.group_size is for the codecs fp32, fp16, bf16, which lose nothing when a result is encoded "
            "again; averaging.codec is int8",
        ),
        (
            "[averaging]\ngroup_size = 8\nquorum = 'majority'",
            "averaging.group_size is for averaging.quorum = 'available' only: the few members of the last exchange",
        ),
        (
            "[averaging]\ngroup_size = 8\n[rounds]\nsetting = 'synchronous'",
            "averaging.group_size is for rounds.setting = 'diloco' only: a synchronous round needs all its",
        ),
        ("[rounds]\nround_samples = 12", "rounds.round_samples (12) must be a multiple of data.microbatch_size (8)"),
        (
            "[rounds]\nsetting = 'synchronous'\nround_samples = 2097160",
            "rounds.round_samples (2097160) makes 262145 microbatches of data.microbatch_size (8), and a synchronous "
            "round has at most 262144",
        ),
        ("[rounds]\ninner_batch_samples = 12", "rounds.inner_batch_samples (12) must be a multiple of"),
        ("[optimizer]\nschedule = 'cosine'", "optimizer.schedule = 'cosine' needs optimizer.total_samples"),
        ("[data]\nheld_out_fraction = 1.0", "data.held_out_fraction must be between 0 and 1, not 1.0"),
        ("[data]\ndataset = 'dummy'\nformat = 'chat'", "data.format 'chat' needs a data.dataset with such rows"),
        ("[data]\ndataset = []", "data.dataset must not be empty"),
        ("[data]\ndataset = ['a', 'b', 'a']", "data.dataset names 'a' twice: give it more of data.weights"),
        (f"[data]\ndataset = {[str(n) for n in range(65)]}", "data.dataset must name at most 64 datasets, not 65"),
        ("[data]\nweights = [1, 2]", "data.weights has 2 numbers, and data.dataset names 1: each needs one"),
        ("[data]\ndataset = ['a', 'b']\nweights = [1, 0]", "data.weights must be positive and finite, not [1.0, 0.0]"),
        ("[data]\npaths = ['a', 'b']", "data.paths names 2 datasets, and the run has 1 path: each needs one"),
        ("[data]\npaths = ['a']\ndataset = 'b'", "data.paths names all datasets: leave data.dataset out"),
        ("[data]\npaths = ['a', 'b']\nweights = [1, 2]", "data.weights needs data.dataset: all of data.paths"),
        (
            "[data]\npart_rows = 9\ndataset = ['hf:x', 'b']",
            "data.part_rows is for Hugging Face datasets, hf:NAME, and not for 'b'",
        ),
        ("[data]\npart_rows = 9\nmax_tokens = 9\ndataset = 'hf:x'", "data.part_rows and data.max_tokens exclude each"),
        (f"[data]\nseed = {1 << 63}", f"data.seed must be at least 0 and below 2^63, not {1 << 63}"),
        (f"[rounds]\nround_samples = {1 << 60}", f"rounds.round_samples must be at most {1 << 48}, not {1 << 60}"),
        ("[optimizer]\nlearning_rate = inf", "optimizer.learning_rate must be finite, not inf"),
        ("[outer]\nmomentum = 1.0", "outer.momentum must be in [0, 1), or -1 to be left out, not 1.0"),
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


def test_no_field_takes_another_type() -> None:
    """Not even a value that Python would convert is taken: `true` is no number, 1 no boolean, and "4" is not 4."""
    values = {bool: "true", int: "4", float: "0.5", str: "'4'", list: "[true]", dict: "{}", None: "1979-05-27"}
    for section, name, default in _fields():
        wrong = [text for kind, text in values.items() if kind is not type(default)]
        if isinstance(default, float):
            wrong.remove("4")
        where = f"{section}.{name}" if section else name
        for text in wrong:
            with pytest.raises(ValueError, match=rf"^x\.toml: {where}(\.0)?: Input should be [^\n]*$"):
                config.from_toml(f"[{section}]\n{name} = {text}" if section else f"{name} = {text}", source="x.toml")
