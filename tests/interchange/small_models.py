"""Small models of every family, with random weights, as transformers makes and saves them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from swarm.config import DataConfig, RunConfig, StagesConfig
from swarm.interchange.source import Source
from swarm.model.stage_module import StageModule
from swarm.model.stages import layer_ranges

VOCABULARY, POSITIONS, NUM_LAYERS = 259, 64, 3
"""The vocabulary has room for bytes."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama-2": lambda: LlamaForCausalLM(LlamaConfig(**{**_SIZES, "num_key_value_heads": 4})),
    "llama-3": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, rope_parameters=_LLAMA3, tie_word_embeddings=True)),
    "llama-linear": lambda: LlamaForCausalLM(
        LlamaConfig(**_SIZES, rope_parameters=_LINEAR, attention_bias=True, mlp_bias=True)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SIZES, head_dim=20, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=20)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=48, n_layer=NUM_LAYERS, n_head=4, n_positions=POSITIONS)
    ),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Make a model in which every weight matters: norms and biases are random as well."""
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(mean + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """Save a model to a folder, and return the model."""
    model = make(name, dtype)
    model.save_pretrained(folder, **options)
    return model


def make_tokens() -> torch.Tensor:
    """Make two samples that use most of the positions."""
    return torch.randint(0, VOCABULARY, (2, POSITIONS - 4), generator=torch.Generator().manual_seed(1))


def logits_of(source: Source, tokens_BT: torch.Tensor, embeddings: list[torch.Tensor] | None = None) -> torch.Tensor:
    """The logits of a model that is cut into one stage for each layer. Its embeddings, at one stage or at two, are
    appended to `embeddings`."""
    stages = StagesConfig(num_stages=source.model.num_layers)
    config = RunConfig(model=source.model, stages=stages, data=DataConfig(sequence_length=8))
    hidden = tokens_BT
    for stage, layer_range in enumerate(layer_ranges(config)):
        module = StageModule(config, stage, layer_range)
        names = {name for name, _ in module.named_parameters()}
        module.load_state_dict(dict(source.tensors(names)), strict=True)
        hidden = module(hidden, dropout_key=None)
        if embeddings is not None and module.embedding is not None:
            embeddings.append(module.embedding.weight)
    return hidden
