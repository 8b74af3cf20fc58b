"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere, a tied head.

Its projections are stored as (inputs, outputs), the transpose of torch's Linear. Those to queries, keys and values are
one tensor, which is ours one below the other once it is transposed.
"""

from typing import Any

from swarm.config import ModelConfig
from swarm.interchange.families.family import Family, Keys, TensorRule

_LAYER = "transformer.h.{layer}"


def _projection(theirs: str, *ours: str) -> tuple[TensorRule, ...]:
    return tuple(
        TensorRule(
            theirs=f"{_LAYER}.{theirs}.{part}",
            ours=tuple(f"layers.{{layer}}.{name}.{part}" for name in ours),
            transposed=part == "weight",
        )
        for part in ("weight", "bias")
    )


def _norm(theirs: str, ours: str) -> tuple[TensorRule, ...]:
    return tuple(TensorRule(theirs=f"{theirs}.{part}", ours=(f"{ours}.{part}",)) for part in ("weight", "bias"))


def _read(keys: Keys) -> dict[str, Any]:
    keys.expect("activation_function", "gelu_new", "gelu_pytorch_tanh")
    keys.expect("scale_attn_weights", True)
    keys.expect("scale_attn_by_inverse_layer_idx", False)
    keys.expect("add_cross_attention", False)
    keys.expect("reorder_and_upcast_attn", False, True)
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"):
        keys.get(name, float, 0.0)
    for name in (
        "summary_activation", "summary_proj_to_labels", "summary_type", "summary_use_proj", "n_ctx",
        "task_specific_params",
    ):  # fmt: skip
        keys.get(name, object, "")
    d_model = keys.size("n_embd")
    return {
        "num_layers": keys.size("n_layer"),
        "d_model": d_model,
        "num_heads": keys.size("n_head"),
        "d_ff": keys.size("n_inner", 4 * d_model),
        "vocab_size": keys.size("vocab_size"),
        "max_positions": keys.size("n_positions"),
        "norm_epsilon": keys.get("layer_norm_epsilon", float, 1e-5),
        "tied_embeddings": keys.get("tie_word_embeddings", bool, True),
        "positions": "learned",
        "norm": "layer",
        "feed_forward": "gelu",
        "qkv_bias": True,
        "attention_output_bias": True,
        "feed_forward_bias": True,
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "n_layer": model.num_layers,
        "n_embd": model.d_model,
        "n_head": model.num_heads,
        "n_inner": model.feed_forward_width,
        "n_positions": model.max_positions,
        "vocab_size": model.vocab_size,
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tied_embeddings,
    }


GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    read=_read,
    write=_write,
    rules=(
        TensorRule(theirs="transformer.wte.weight", ours=("embedding.weight",)),
        TensorRule(theirs="transformer.wpe.weight", ours=("positions.weight",)),
        *_norm(f"{_LAYER}.ln_1", "layers.{layer}.attention_norm"),
        *_projection("attn.c_attn", "attention.q", "attention.k", "attention.v"),
        *_projection("attn.c_proj", "attention.output"),
        *_norm(f"{_LAYER}.ln_2", "layers.{layer}.feed_forward_norm"),
        *_projection("mlp.c_fc", "feed_forward.up"),
        *_projection("mlp.c_proj", "feed_forward.down"),
        *_norm("transformer.ln_f", "head.norm"),
        TensorRule(theirs="lm_head.weight", ours=("head.output.weight",)),
    ),
    no_tensors=(".attn.bias", ".attn.masked_bias"),
    prefix="transformer.",
    special_tokens={"bos_token_id": 50256, "eos_token_id": 50256},
)
