"""Rotary positions, and attention where groups of queries have no kernel."""

from typing import Any

import pytest
import torch

from swarm.config import ModelConfig, RunConfig
from swarm.model import attention as attention_module
from swarm.model.attention import CausalSelfAttention, rotary_tables
from swarm.model.functions import rotate
from swarm.model.stages import build_transformer


def test_rotary_scores_depend_on_distance_alone() -> None:
    q_K, k_K = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    tables = rotary_tables(ModelConfig(d_model=8, num_heads=1), torch.arange(12))
    q_BHTK = rotate(q_K.expand(1, 1, 12, 8), *tables)
    k_BHTK = rotate(k_K.expand(1, 1, 12, 8), *tables)
    scores_TT = (q_BHTK @ k_BHTK.mT)[0, 0]
    for distance in range(-11, 12):
        diagonal = scores_TT.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert scores_TT[0].std() > 1e-2


def test_rotary_turns_by_the_frequencies_of_the_paper() -> None:
    cos_TJ, sin_TJ = rotary_tables(ModelConfig(d_model=4, num_heads=1, rope_theta=100.0), torch.arange(3))
    expected = [[position * 100.0 ** (-2 * pair / 4) for pair in range(2)] for position in range(3)]
    torch.testing.assert_close(torch.atan2(sin_TJ, cos_TJ), torch.tensor(expected))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_without_a_kernel_for_groups_is_the_same(num_kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = CausalSelfAttention(ModelConfig(d_model=32, num_heads=4, num_kv_heads=num_kv_heads), 32)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tables = rotary_tables(ModelConfig(d_model=32, num_heads=4), torch.arange(9))
    seen = []

    def compute() -> list[torch.Tensor]:
        output = attention(hidden, *tables)
        return [output, *torch.autograd.grad(output.square().sum(), [hidden, *attention.parameters()])]

    grouped = compute()
    monkeypatch.setattr(attention_module, "has_grouped_kernel", lambda *_: False)
    attend = torch.nn.functional.scaled_dot_product_attention

    def spied(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((q.shape, k.shape, v.shape, options))
        output: torch.Tensor = attend(q, k, v, **options)
        return output

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
    for one, other in zip(grouped, compute(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    shape = torch.Size([2, 4, 9, 8])
    assert seen == [(shape, shape, shape, {"attn_mask": None, "is_causal": True, "enable_gqa": False})]


def test_no_position_sees_a_later_one() -> None:
    """The gradient of the logits at one position with respect to the embedded tokens is zero after it."""
    model = ModelConfig(num_layers=3, d_model=48, num_heads=4, num_kv_heads=2, vocab_size=64, init_std=0.2)
    transformer = build_transformer(RunConfig(model=model), device="cpu")
    seen: list[torch.Tensor] = []
    assert transformer.embedding is not None
    transformer.embedding.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    logits = transformer(torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0)))
    for position in (0, 7, 15):
        (gradient,) = torch.autograd.grad(logits[:, position].square().sum(), seen[0], retain_graph=True)
        reach = gradient.abs().amax(dim=(0, 2))
        assert (reach[: position + 1] > 0).all()
        assert (reach[position + 1 :] == 0).all()
