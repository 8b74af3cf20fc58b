"""A stage with adapters: what is trained, what it computes, and in which types it is held."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.func import functional_call

from swarm.config import DataConfig, LoraConfig, ModelConfig, RunConfig, StagesConfig
from swarm.model.adapters import adapter_names, merged, trained_parameters
from swarm.model.masks import DropoutKey
from swarm.model.stages import (
    Transformer,
    build_stage,
    build_transformer,
    parameter_shapes,
    tied_stages,
    trained_shapes,
)

KEY = DropoutKey(seed=3, microbatch=11)
LLAMA = ModelConfig(num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, vocab_size=40, tied_embeddings=True)
GPT2 = ModelConfig(
    num_layers=2, d_model=32, num_heads=4, vocab_size=40, norm="layer", feed_forward="gelu", positions="learned",
    max_positions=16, qkv_bias=True, attention_output_bias=True, feed_forward_bias=True,
)  # fmt: skip


def make_config(model: ModelConfig = LLAMA, num_stages: int = 1, **lora: Any) -> RunConfig:
    return RunConfig(
        model=model, stages=StagesConfig(num_stages=num_stages), lora=LoraConfig(rank=4, **lora),
        data=DataConfig(sequence_length=12, seed=5),
    )  # fmt: skip


def make_tokens() -> torch.Tensor:
    return torch.randint(0, 40, (3, 13), generator=torch.Generator().manual_seed(0))


def stirred(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The trained parameters with numbers in both matrices, as after some steps."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: (0.1 * torch.randn(parameter.shape, generator=generator)).requires_grad_()
        for name, parameter in trained_parameters(module).items()
    }


def plain_model(config: RunConfig, module: torch.nn.Module, values: dict[str, torch.Tensor]) -> Transformer:
    """The same model in float32 without adapters, whose weights include what the adapters add."""
    plain = Transformer(config)
    names, base = adapter_names(config), dict(module.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            value = base[name].float()
            if name in names:
                adapter = names[name]
                value = merged(value, values[adapter.a], values[adapter.b], config.lora.scale)
            parameter.copy_(value)
    return plain


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_adapters_begin_as_the_model_itself_and_are_all_that_is_trained(model: ModelConfig) -> None:
    config = make_config(model)
    module = build_transformer(config, device="cpu")
    trained = trained_parameters(module)
    assert all(".adapter." in name for name in trained)
    assert trained.keys() == trained_shapes(config, 0).keys()
    assert dict(module.named_parameters()).keys() - trained.keys() == parameter_shapes(config, 0).keys()
    for name, parameter in trained.items():
        if name.endswith(".b"):
            assert not parameter.any()
        else:
            bound = 1 / math.sqrt(parameter.shape[1])
            assert 0.9 * bound < parameter.abs().max() <= bound
    tokens = make_tokens()[:, :-1]
    plain = plain_model(config, module, dict(trained))
    torch.testing.assert_close(module(tokens), plain(tokens), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_merged_weights(model: ModelConfig, checkpointing: bool) -> None:
    """With W' = W + s B A, dB = s dW' A^T and dA = s B^T dW'; an A that several adapters share gets their sum."""
    config = make_config(dataclasses.replace(model, gradient_checkpointing=checkpointing), alpha=8.0)
    module = build_transformer(config, device="cpu")
    values, tokens = stirred(module), make_tokens()
    plain = plain_model(config, module, values)
    loss = functional_call(module, values, (tokens[:, :-1],)).square().mean()
    expected_loss = plain(tokens[:, :-1]).square().mean()
    torch.testing.assert_close(loss, expected_loss)
    gradients = dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))
    expected_loss.backward()
    expected = {name: torch.zeros_like(value) for name, value in values.items()}
    weights = dict(plain.named_parameters())
    for name, adapter in adapter_names(config).items():
        gradient_ED = weights[name].grad
        assert gradient_ED is not None
        expected[adapter.a] += config.lora.scale * values[adapter.b].detach().T @ gradient_ED
        expected[adapter.b] += config.lora.scale * gradient_ED @ values[adapter.a].detach().T
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("autocast", ["off", "bf16"])
def test_a_cut_changes_nothing(autocast: Any) -> None:
    config = make_config(dataclasses.replace(LLAMA, autocast=autocast, dropout=0.1), num_stages=2, dropout=0.3)
    whole = build_transformer(config, device="cpu")
    stages = [build_stage(config, stage, device="cpu") for stage in range(2)]
    values, tokens = stirred(whole), make_tokens()[:, :-1]
    own = [{name: values[name] for name in trained_parameters(stage)} for stage in stages]
    assert own[0].keys() | own[1].keys() == values.keys()
    assert tied_stages(config) == ()
    hidden = functional_call(stages[0], own[0], (tokens,), {"dropout_key": KEY})
    logits = functional_call(stages[1], own[1], (hidden,), {"dropout_key": KEY})
    assert torch.equal(logits, functional_call(whole, values, (tokens,), {"dropout_key": KEY}))
    assert not torch.equal(logits, functional_call(whole, values, (tokens,), {"dropout_key": None}))


def test_given_matrices_keep_their_type_and_memory() -> None:
    config = make_config()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, weights="0" * 64))
    weights = {
        name: torch.randn(shape).to(torch.float16 if len(shape) > 1 else torch.float32)
        for name, shape in parameter_shapes(config, 0).items()
    }
    held = dict(build_stage(config, 0, device="cpu", weights=weights).named_parameters())
    for name, weight in weights.items():
        if weight.ndim > 1:
            assert held[name].dtype is torch.float16
            assert held[name].data_ptr() == weight.data_ptr()
        assert torch.equal(held[name], weight)


@pytest.mark.parametrize(
    ("lora", "model", "fault"),
    [
        ({"targets": ("wq",)}, {}, "lora.targets: this model has no 'wq', only q_proj"),
        ({"targets": ("c_attn",)}, {}, "this model has no 'c_attn'"),
        ({"targets": ("gate_proj",)}, {"feed_forward": "gelu"}, "this model has no 'gate_proj'"),
        ({"targets": ("all-linear", "q_proj")}, {}, "means all matrices"),
        ({"targets": ()}, {}, "at least one matrix"),
        ({"alpha": 0.0}, {}, "lora.alpha must be positive"),
        ({"dropout": 1.0}, {}, "lora.dropout must be in"),
        ({"rank": -1}, {}, "lora.rank must not be negative"),
        ({"rank": 33}, {}, "must not exceed model.d_model"),
        ({}, {"custom_class": "a:B", "tied_embeddings": False}, "not for a model.custom_class"),
        ({}, {"bottleneck_dim": 8, "tied_embeddings": False}, "not for a model with a model.bottleneck_dim"),
    ],
)
def test_what_cannot_be_is_refused_by_name(lora: dict[str, Any], model: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        RunConfig(
            model=dataclasses.replace(LLAMA, **model),
            lora=LoraConfig(**{"rank": 4, **lora}),
            stages=StagesConfig(num_stages=1),
        )


def test_a_stage_without_layers_has_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="must not have a 0 with lora"):
        RunConfig(model=LLAMA, lora=LoraConfig(rank=4), stages=StagesConfig(num_stages=2, layers_per_stage=(2, 0)))
