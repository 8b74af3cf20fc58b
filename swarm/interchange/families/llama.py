"""Llama and its relatives: Mistral, Qwen2, Qwen3 and Phi-3, which differ in a bias, a norm, a window and how matrices
are stored.

SmolLM2 and TinyLlama are Llamas by their own configuration. Their rotary positions pair the same elements as ours do,
so no rows of a matrix are permuted.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from swarm.config import ModelConfig
from swarm.interchange.families.family import Family, Keys, TensorRule

_LAYER = "model.layers.{layer}"
_LLAMA_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
_PHI3_TOKENS = {"bos_token_id": 1, "eos_token_id": 32_000, "pad_token_id": 32_000}


def _projection(theirs: str, *ours: str) -> tuple[TensorRule, ...]:
    return tuple(
        TensorRule(theirs=f"{_LAYER}.{theirs}.{part}", ours=tuple(f"layers.{{layer}}.{name}.{part}" for name in ours))
        for part in ("weight", "bias")
    )


_SHARED_RULES = (
    TensorRule(theirs="model.embed_tokens.weight", ours=("embedding.weight",)),
    *_projection("input_layernorm", "attention_norm"),
    *_projection("self_attn.o_proj", "attention.output"),
    *_projection("post_attention_layernorm", "feed_forward_norm"),
    *_projection("mlp.down_proj", "feed_forward.down"),
    TensorRule(theirs="model.norm.weight", ours=("head.norm.weight",)),
    TensorRule(theirs="lm_head.weight", ours=("head.output.weight",)),
)
_RULES = (
    *_projection("self_attn.q_proj", "attention.q"),
    *_projection("self_attn.k_proj", "attention.k"),
    *_projection("self_attn.v_proj", "attention.v"),
    *_projection("self_attn.q_norm", "attention.q_norm"),
    *_projection("self_attn.k_norm", "attention.k_norm"),
    *_projection("mlp.gate_proj", "feed_forward.gate"),
    *_projection("mlp.up_proj", "feed_forward.up"),
    *_SHARED_RULES,
)
_PHI3_RULES = (
    *_projection("self_attn.qkv_proj", "attention.q", "attention.k", "attention.v"),
    *_projection("mlp.gate_up_proj", "feed_forward.gate", "feed_forward.up"),
    *_SHARED_RULES,
)


def _read(keys: Keys) -> dict[str, Any]:
    keys.expect("hidden_act", "silu")
    keys.expect("rope_interleaved", False)
    keys.expect("use_mrope", False)
    keys.expect("partial_rotary_factor", 1.0)
    num_heads = keys.size("num_attention_heads")
    return {
        "num_layers": keys.size("num_hidden_layers"),
        "d_model": keys.size("hidden_size"),
        "num_heads": num_heads,
        "num_kv_heads": keys.size("num_key_value_heads", num_heads),
        "head_width": keys.size("head_dim", 0),
        "d_ff": keys.size("intermediate_size"),
        "vocab_size": keys.size("vocab_size"),
        "norm_epsilon": keys.get("rms_norm_eps", float, 1e-6),
        "tied_embeddings": keys.get("tie_word_embeddings", bool, False),
        "max_positions": keys.size("max_position_embeddings"),
        **_read_rope(keys),
    }


def _read_rope(keys: Keys) -> dict[str, Any]:
    """Read rotary positions as transformers 5 writes them, or as earlier versions did."""
    fields = {"rope_theta": keys.get("rope_theta", float, 10_000.0)}
    sections = [section for section in map(keys.section, ("rope_parameters", "rope_scaling")) if section is not None]
    said = []
    for section in sections:
        fields = _read_rope_section(section, fields["rope_theta"])
        said.append(fields)
    if any(other != fields for other in said):
        raise ValueError(
            "rope_parameters and rope_scaling describe different rotary positions; "
            "take out the one with which the model was not trained"
        )
    return fields


def _read_rope_section(rope: Keys, theta: float) -> dict[str, Any]:
    """Read one section about rotary positions. `theta` is the rope_theta to take if the section has none."""
    theta = rope.get("rope_theta", float, theta)
    rope.expect("partial_rotary_factor", 1.0)
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    fields: dict[str, Any] = {"rope_theta": theta}
    if kind == "linear":
        fields |= {"rope_scaling": "linear", "rope_factor": rope.get("factor", float)}
        rope.size("original_max_position_embeddings", 1)  # Other ways of scaling need it.
    elif kind == "llama3":
        fields |= {
            "rope_scaling": "llama3",
            "rope_factor": rope.get("factor", float),
            "rope_low_frequency_factor": rope.get("low_freq_factor", float),
            "rope_high_frequency_factor": rope.get("high_freq_factor", float),
            "rope_original_positions": rope.size("original_max_position_embeddings"),
        }
    elif kind != "default":
        raise ValueError(f"rotary positions of type {kind!r} are not supported")
    rope.finish()
    return fields


def _write(model: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "hidden_act": "silu",
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.width_of_heads,
        "intermediate_size": model.feed_forward_width,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tied_embeddings,
        "max_position_embeddings": model.max_positions,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
    }
    if model.rope_scaling == "linear":
        values["rope_scaling"] = {"rope_type": "linear", "factor": model.rope_factor}
    elif model.rope_scaling == "llama3":
        values["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope_factor,
            "low_freq_factor": model.rope_low_frequency_factor,
            "high_freq_factor": model.rope_high_frequency_factor,
            "original_max_position_embeddings": model.rope_original_positions,
        }
    return values


def _read_llama(keys: Keys) -> dict[str, Any]:
    has_biases = keys.get("attention_bias", bool, False)
    return _read(keys) | {
        "qkv_bias": has_biases,
        "attention_output_bias": has_biases,
        "feed_forward_bias": keys.get("mlp_bias", bool, False),
    }


def _write_llama(model: ModelConfig) -> dict[str, Any]:
    return _write(model) | {"attention_bias": model.qkv_bias, "mlp_bias": model.feed_forward_bias}


def _within_window(fields: dict[str, Any], window: int) -> dict[str, Any]:
    """Limit sequences to the sliding window: up to that length the model computes the same as one without a window."""
    return fields | {"max_positions": min(fields["max_positions"], window)}


def _read_mistral(keys: Keys) -> dict[str, Any]:
    fields = _read(keys)
    # Without the key the window is transformers' default; null means that there is no window.
    window = keys.size("sliding_window", fields["max_positions"]) if keys.has("sliding_window") else 4096
    return _within_window(fields, window)


def _write_mistral(model: ModelConfig) -> dict[str, Any]:
    return _write(model) | {"sliding_window": None}


def _read_qwen(keys: Keys) -> dict[str, Any]:
    fields = _read(keys)
    window = keys.size("sliding_window", fields["max_positions"])
    is_used = keys.get("use_sliding_window", bool, False)
    kinds = set(map(str, keys.get("layer_types", list, ["full_attention"])))
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types has {min(kinds)!r}, which is not supported")
    return _within_window(fields, window) if is_used or "sliding_attention" in kinds else fields


def _read_qwen2(keys: Keys) -> dict[str, Any]:
    return _read_qwen(keys) | {"qkv_bias": True}


def _read_qwen3(keys: Keys) -> dict[str, Any]:
    has_biases = keys.get("attention_bias", bool, False)
    fields = _read_qwen(keys)
    head_width = fields["head_width"] or 128
    biases = {"qkv_bias": has_biases, "attention_output_bias": has_biases}
    return fields | biases | {"head_width": head_width, "qk_norm": True}


def _read_phi3(keys: Keys) -> dict[str, Any]:
    keys.size("original_max_position_embeddings", 1)  # Ways of scaling that are not supported need it.
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        keys.expect(name, False)
    for name in ("embd_pdrop", "resid_pdrop"):
        keys.get(name, float, 0.0)
    fields = _read(keys)
    return _within_window(fields, keys.size("sliding_window", fields["max_positions"]))


def _write_qwen2(model: ModelConfig) -> dict[str, Any]:
    return _write(model) | {"use_sliding_window": False, "sliding_window": None}


def _write_qwen3(model: ModelConfig) -> dict[str, Any]:
    return _write_qwen2(model) | {"attention_bias": model.qkv_bias}


def _family(
    architecture: str, model_type: str, read: Callable[[Keys], dict[str, Any]],
    write: Callable[[ModelConfig], dict[str, Any]], special_tokens: Mapping[str, int] = MappingProxyType({}),
    rules: tuple[TensorRule, ...] = _RULES,
) -> Family:  # fmt: skip
    return Family(
        architecture=architecture, model_type=model_type, read=read, write=write, rules=rules,
        no_tensors=(".rotary_emb.inv_freq",), prefix="model.", special_tokens=special_tokens,
    )  # fmt: skip


LLAMA = _family("LlamaForCausalLM", "llama", _read_llama, _write_llama, _LLAMA_TOKENS)
MISTRAL = _family("MistralForCausalLM", "mistral", _read_mistral, _write_mistral, _LLAMA_TOKENS)
PHI3 = _family("Phi3ForCausalLM", "phi3", _read_phi3, _write, _PHI3_TOKENS, _PHI3_RULES)
QWEN2 = _family("Qwen2ForCausalLM", "qwen2", _read_qwen2, _write_qwen2)
QWEN3 = _family("Qwen3ForCausalLM", "qwen3", _read_qwen3, _write_qwen3)
