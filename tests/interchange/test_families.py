"""Every family computes what transformers computes, under any cut, and comes back bit by bit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swarm.config import DataConfig, ModelConfig, RunConfig, StagesConfig
from swarm.config.reading import load_preset
from swarm.interchange import export
from swarm.interchange.export import Card, Origin, export_model
from swarm.interchange.families.known import family_of, read_config
from swarm.interchange.source import Source
from swarm.model.stages import build_stage
from tests.interchange.small_models import MODELS, logits_of, make_tokens, save

CARD = Card(round=0, num_samples=0, losses={})


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, tokens_BT, embeddings = save(name, tmp_path), make_tokens(), list[torch.Tensor]()
    logits_BTV = logits_of(Source(tmp_path), tokens_BT, embeddings)
    expected = model(tokens_BT, labels=tokens_BT)
    loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(expected.loss, model.get_input_embeddings().weight)
    torch.testing.assert_close(sum(torch.autograd.grad(loss, embeddings)), gradient, rtol=1e-3, atol=1e-5)
    ours, theirs = logits_BTV.detach(), expected.logits.detach()
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < 1e-4
    ours, theirs = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    divergence_BT = (theirs.exp() * (theirs - ours)).sum(-1)
    assert abs(divergence_BT).max() < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_what_comes_in_goes_out_bit_by_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save(name, tmp_path / "in", dtype)
    source = Source(tmp_path / "in")
    config = RunConfig(model=source.model, stages=StagesConfig(num_stages=1), data=DataConfig(sequence_length=8))
    export_model(
        Origin(config=config, load=lambda names: dict(source.tensors(names)), card=CARD, tokenizer="bytes"),
        tmp_path / "out",
    )
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("in", "out"))
    assert before.keys() == after.keys()
    for theirs, tensor in before.items():
        assert tensor.dtype == after[theirs].dtype == dtype
        assert torch.equal(tensor, after[theirs]), theirs
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    if name != "mistral":  # Without a window it is a Llama.
        assert type(loaded).__name__ == source.family.architecture


@torch.no_grad()
def test_a_gpt2_without_biases_is_exported_with_zeros_for_them_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", 1 << 20)
    model = load_preset("shakespeare-cpu").model
    config = RunConfig(model=model, stages=StagesConfig(num_stages=1), data=DataConfig(sequence_length=8))
    ours, tokens_BT = build_stage(config, 0, device="cpu"), make_tokens() % model.vocab_size
    weights = dict(ours.named_parameters())
    origin = Origin(
        config=config, load=lambda names: {name: weights[name] for name in names}, card=CARD, tokenizer="bytes"
    )
    files = export_model(origin, tmp_path / "out")
    assert sum(file.suffix == ".safetensors" for file in files) > 2
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (loaded.eval()(tokens_BT).logits - ours(tokens_BT, dropout_key=None)).abs().max() < 1e-4


def _changed(tmp_path: Path, name: str, **values: Any) -> Path:
    """Make a family's config.json with some keys changed."""
    save(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return path


@pytest.mark.parametrize(
    ("name", "values", "fault"),
    [
        (
            "llama-2",
            {"architectures": ["MixtralForCausalLM"]},
            "the architecture 'MixtralForCausalLM' is not supported",
        ),
        ("llama-2", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ("llama-2", {"residual_multiplier": 0.2}, "residual_multiplier = 0.2 is not known"),
        ("llama-2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "of type 'yarn' are not supported"),
        ("llama-3", {"rope_parameters": {"rope_type": "default", "mscale": 2}}, "mscale = 2 is not known"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True is not supported"),
        ("qwen3", {"quantization_config": {"bits": 4}}, "a quantized model cannot be trained"),
        ("llama-2", {"num_hidden_layers": 10**12}, "model.num_layers must be at most"),
    ],
)
def test_what_changes_the_maths_is_refused_by_name(
    name: str, values: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=fault):
        read_config(_changed(tmp_path, name, **values))


def test_older_spellings_of_rotary_positions_are_read(tmp_path: Path) -> None:
    old = {"type": "linear", "factor": 2.0, "original_max_position_embeddings": 32}
    _, model = read_config(_changed(tmp_path, "llama-2", rope_parameters=None, rope_theta=5e5, rope_scaling=old))
    assert (model.rope_theta, model.rope_scaling, model.rope_factor) == (5e5, "linear", 2.0)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_two_spellings_that_differ_are_refused(kind: str, tmp_path: Path) -> None:
    default = {"rope_type": "default", "rope_theta": 5e5}
    path = _changed(tmp_path, "llama-2", rope_parameters=default, rope_scaling={"type": kind, "factor": 2.0})
    with pytest.raises(ValueError, match=r"describe different rotary|'yarn' are not supported"):
        read_config(path)


@pytest.mark.parametrize(("window", "longest"), [(16, 16), (None, 64), (4096, 64)])
def test_a_window_bounds_the_length_of_sequences(window: int | None, longest: int, tmp_path: Path) -> None:
    _, model = read_config(_changed(tmp_path, "mistral", sliding_window=window))
    assert model.max_positions == longest


@pytest.mark.parametrize(
    ("fields", "architecture"),
    [
        ({}, "LlamaForCausalLM"),
        ({"tied_embeddings": True, "num_kv_heads": 1}, "LlamaForCausalLM"),
        ({"qkv_bias": True}, "Qwen2ForCausalLM"),
        ({"qk_norm": True}, "Qwen3ForCausalLM"),
        ({"block_types": "tp", "num_shards": 2}, "LlamaForCausalLM"),
        ({"norm": "layer", "positions": "learned", "feed_forward": "gelu"}, "GPT2LMHeadModel"),
    ],
)
def test_a_run_of_ours_has_a_family(fields: dict[str, Any], architecture: str) -> None:
    model = dataclasses.replace(ModelConfig(max_positions=128), **fields)
    assert family_of(model).architecture == architecture


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"custom_class": "a:B"}, "custom_class has no counterpart"),
        ({"bottleneck_dim": 8}, "bottleneck_dim has no counterpart"),
        ({"norm": "layer"}, "no architecture of transformers"),
        (
            {"block_types": ("tp", "spd", "tp", "parallel"), "num_shards": 2},
            "parallel and spd blocks has no counterpart",
        ),
    ],
)
def test_what_no_architecture_computes_is_said(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        family_of(ModelConfig(max_positions=128, **fields))


def test_a_field_that_no_family_knows_is_never_lost_in_silence() -> None:
    """A new field that is forgotten here stops the export of models that use it."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Later(ModelConfig):
        rope_share: float = 1.0

    assert family_of(Later(max_positions=128)).architecture == "LlamaForCausalLM"
    with pytest.raises(ValueError, match="no architecture of transformers"):
        family_of(Later(max_positions=128, rope_share=0.5))
