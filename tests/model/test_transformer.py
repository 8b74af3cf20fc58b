"""The reference is a Llama: it is compared with Hugging Face's implementation, and it is causal."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swarm.config import ModelConfig, RunConfig, StagesConfig
from swarm.model.masks import DropoutKey
from swarm.model.stages import Transformer, build_transformer

MODEL = ModelConfig(num_layers=3, d_model=48, num_heads=4, vocab_size=64, init_std=0.2, rope_theta=500.0)
KEY = DropoutKey(seed=0, microbatch=1)
HUGGING_FACE_NAMES = {
    "embedding.": "model.embed_tokens.", "layers.": "model.layers.", ".attention.q.": ".self_attn.q_proj.",
    ".attention.k.": ".self_attn.k_proj.", ".attention.v.": ".self_attn.v_proj.",
    ".attention.output.": ".self_attn.o_proj.", ".feed_forward.gate.": ".mlp.gate_proj.",
    ".feed_forward.up.": ".mlp.up_proj.", ".feed_forward.down.": ".mlp.down_proj.",
    ".attention_norm.": ".input_layernorm.", ".feed_forward_norm.": ".post_attention_layernorm.",
    "head.norm.": "model.norm.", "head.output.": "lm_head.",
}  # fmt: skip


def make_transformer(**model: Any) -> Transformer:
    config = RunConfig(model=dataclasses.replace(MODEL, **model), stages=StagesConfig(num_stages=1))
    return build_transformer(config, device="cpu")


def make_tokens(num_columns: int = 16) -> torch.Tensor:
    return torch.randint(0, MODEL.vocab_size, (2, num_columns), generator=torch.Generator().manual_seed(0))


def hugging_face_twin(transformer: Transformer) -> LlamaForCausalLM:
    model = transformer.model
    twin = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab_size, hidden_size=model.d_model, intermediate_size=model.feed_forward_width,
            num_hidden_layers=model.num_layers, num_attention_heads=model.num_heads, num_key_value_heads=model.kv_heads,
            rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta}, rms_norm_eps=model.norm_epsilon,
            tie_word_embeddings=model.tied_embeddings,
        )
    )  # fmt: skip
    renamed = {}
    for name, weight in transformer.state_dict().items():
        for ours, theirs in HUGGING_FACE_NAMES.items():
            name = name.replace(ours, theirs)
        renamed[name] = weight
    missing, unexpected = twin.load_state_dict(renamed, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if model.tied_embeddings else [])
    return twin


@pytest.mark.parametrize(
    "variant",
    [{}, {"num_kv_heads": 2}, {"num_kv_heads": 1}, {"tied_embeddings": True}, {"d_ff": 50, "norm_epsilon": 0.1}],
)
def test_logits_and_gradients_are_those_of_hugging_face_llama(variant: dict[str, Any]) -> None:
    transformer = make_transformer(**variant)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(1))
    twin = hugging_face_twin(transformer)
    tokens = make_tokens()
    theirs = twin(tokens, labels=tokens)
    assert theirs.logits.std() > 0.1
    torch.testing.assert_close(transformer(tokens[:, :-1]), theirs.logits[:, :-1], rtol=0, atol=1e-4)

    loss = transformer.loss(tokens)
    torch.testing.assert_close(loss, theirs.loss, rtol=0, atol=1e-5)
    torch.autograd.backward(loss)
    torch.autograd.backward(theirs.loss)
    torch.testing.assert_close(
        transformer.get_parameter("embedding.weight").grad, twin.model.embed_tokens.weight.grad, rtol=1e-4, atol=1e-5
    )


def test_no_position_sees_a_later_one() -> None:
    """The gradient of the logits at one position with respect to the embedded tokens is zero after it."""
    transformer = make_transformer(num_kv_heads=2)
    seen: list[torch.Tensor] = []
    assert transformer.embedding is not None
    transformer.embedding.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    logits = transformer(make_tokens())
    for position in (0, 7, 15):
        (gradient,) = torch.autograd.grad(logits[:, position].square().sum(), seen[0], retain_graph=True)
        reach = gradient.abs().amax(dim=(0, 2))
        assert (reach[: position + 1] > 0).all()
        assert (reach[position + 1 :] == 0).all()


def test_same_key_same_loss_and_other_key_other_loss() -> None:
    transformer = make_transformer(dropout=0.3)
    tokens = make_tokens()
    loss = transformer.loss(tokens, KEY)
    assert torch.equal(loss, transformer.loss(tokens, KEY))
    assert not torch.equal(loss, transformer.loss(tokens, DropoutKey(seed=0, microbatch=2)))
    assert not torch.equal(loss, transformer.loss(tokens))
    assert torch.equal(transformer.loss(tokens), make_transformer().loss(tokens))


def test_an_untrained_model_knows_nothing() -> None:
    loss = make_transformer(init_std=0.02).loss(make_tokens(64))
    assert loss.item() == pytest.approx(math.log(MODEL.vocab_size), abs=0.05)


def test_tied_embeddings_have_one_matrix() -> None:
    tied, untied = make_transformer(tied_embeddings=True), make_transformer()
    assert untied.state_dict().keys() - tied.state_dict().keys() == {"head.output.weight"}


def test_a_custom_class_has_no_built_in_reference() -> None:
    with pytest.raises(ValueError, match="build_stage"):
        make_transformer(custom_class="package.module:Class")
