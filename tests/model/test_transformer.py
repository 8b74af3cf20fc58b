"""The whole model in one process; tests/interchange compares it with Hugging Face's implementations."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from swarm.config import ModelConfig, RunConfig, StagesConfig
from swarm.model.masks import DropoutKey
from swarm.model.stages import Transformer, build_transformer

MODEL = ModelConfig(num_layers=3, d_model=48, num_heads=4, vocab_size=64, init_std=0.2, rope_theta=500.0)
KEY = DropoutKey(seed=0, microbatch=1)


def make_transformer(**model: Any) -> Transformer:
    config = RunConfig(model=dataclasses.replace(MODEL, **model), stages=StagesConfig(num_stages=1))
    return build_transformer(config, device="cpu")


def make_tokens(num_columns: int = 16) -> torch.Tensor:
    return torch.randint(0, MODEL.vocab_size, (2, num_columns), generator=torch.Generator().manual_seed(0))


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
