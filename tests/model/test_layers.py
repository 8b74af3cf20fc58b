"""Rotary positions, norm and keyed dropout."""

import math
from typing import Any

import pytest
import torch

from swarm.config import ModelConfig
from swarm.model import layers
from swarm.model.functions import rotate
from swarm.model.layers import (
    CausalSelfAttention,
    DropoutKey,
    RMSNorm,
    dropout,
    has_grouped_kernel,
    rotary_tables,
)

KEY = DropoutKey(seed=1, microbatch=7)
CPU = torch.device("cpu")


def test_rotary_scores_depend_on_distance_alone() -> None:
    q_K, k_K = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    tables = rotary_tables(ModelConfig(d_model=8, num_heads=1), 12, CPU)
    q_BHTK = rotate(q_K.expand(1, 1, 12, 8), *tables)
    k_BHTK = rotate(k_K.expand(1, 1, 12, 8), *tables)
    scores_TT = (q_BHTK @ k_BHTK.mT)[0, 0]
    for distance in range(-11, 12):
        diagonal = scores_TT.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert scores_TT[0].std() > 1e-2


def test_rotary_turns_by_the_frequencies_of_the_paper() -> None:
    cos_TJ, sin_TJ = rotary_tables(ModelConfig(d_model=4, num_heads=1, rope_theta=100.0), 3, CPU)
    expected = [[position * 100.0 ** (-2 * pair / 4) for pair in range(2)] for position in range(3)]
    torch.testing.assert_close(torch.atan2(sin_TJ, cos_TJ), torch.tensor(expected))


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "head_width", "expected"),
    [
        ("cpu", None, torch.float32, 64, True),
        ("cpu", None, torch.bfloat16, 512, True),
        ("cuda", (9, 0), torch.float32, 64, False),
        ("cuda", (9, 0), torch.bfloat16, 64, True),
        ("cuda", (8, 0), torch.float16, 256, True),
        ("cuda", (8, 0), torch.bfloat16, 257, False),
        ("cuda", (7, 5), torch.float16, 64, False),
        ("mps", None, torch.float32, 64, False),
        ("mps", None, torch.float16, 64, False),
    ],
)
def test_groups_are_left_to_the_kernels_that_know_them(
    device: str, capability: tuple[int, int] | None, dtype: torch.dtype, head_width: int, expected: bool
) -> None:
    """On other devices torch would take the kernel that writes out all T x T weights."""
    assert has_grouped_kernel(device, capability, dtype, head_width) is expected


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_without_a_kernel_for_groups_is_the_same(num_kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = CausalSelfAttention(ModelConfig(d_model=32, num_heads=4, num_kv_heads=num_kv_heads), 32)
    hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tables = rotary_tables(ModelConfig(d_model=32, num_heads=4), 9, CPU)
    seen = []

    def compute() -> list[torch.Tensor]:
        output = attention(hidden, *tables)
        return [output, *torch.autograd.grad(output.square().sum(), [hidden, *attention.parameters()])]

    grouped = compute()
    monkeypatch.setattr(layers, "has_grouped_kernel", lambda *_: False)
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


def test_rms_norm_ignores_the_scale_of_its_input() -> None:
    norm = RMSNorm(16, 1e-12)
    hidden = torch.randn(2, 3, 16)
    torch.testing.assert_close(norm(hidden * 100), norm(hidden))
    torch.testing.assert_close(norm(hidden).square().mean(-1), torch.ones(2, 3))


def test_dropout_follows_from_its_key_and_not_from_the_global_state() -> None:
    hidden = torch.ones(4, 8, 32)
    torch.manual_seed(0)
    first = dropout(hidden, 0.5, KEY, "layers.0.attention")
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(first, dropout(hidden, 0.5, KEY, "layers.0.attention"))
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("key", "site"),
    [
        (DropoutKey(seed=1, microbatch=8), "layers.0.attention"),
        (DropoutKey(seed=2, microbatch=7), "layers.0.attention"),
        (KEY, "layers.1.attention"),
        (KEY, "layers.0.feed_forward"),
    ],
)
def test_dropout_differs_in_every_part_of_the_key(key: DropoutKey, site: str) -> None:
    hidden = torch.ones(4, 8, 32)
    same = dropout(hidden, 0.5, KEY, "layers.0.attention") == dropout(hidden, 0.5, key, site)
    # Independent masks of probability one half agree on half of the 1024 elements, give or take 5 deviations.
    assert abs(same.float().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(1024)


def test_dropout_masks_stay_what_they_were() -> None:
    """A peer on another device or of another release must compute a microbatch again with the same masks."""
    kept = dropout(torch.ones(1, 2, 8), 0.5, KEY, "embedding")[0] > 0
    assert kept.int().tolist() == [[1, 0, 1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 1, 1, 0]]


def test_dropout_zeroes_the_share_it_is_told_and_keeps_the_mean() -> None:
    dropped = dropout(torch.ones(16, 32, 32), 0.2, KEY, "embedding")
    assert set(dropped.flatten().tolist()) == {0.0, 1.25}
    assert (dropped == 0).float().mean().item() == pytest.approx(0.2, abs=0.02)


def test_dropout_without_a_key_is_the_identity() -> None:
    hidden = torch.randn(2, 3, 4)
    assert dropout(hidden, 0.5, None, "embedding") is hidden


def test_dropout_masks_are_the_same_in_every_dtype() -> None:
    hidden = torch.ones(2, 8, 32)
    full = dropout(hidden, 0.5, KEY, "embedding")
    assert torch.equal(full, dropout(hidden.bfloat16(), 0.5, KEY, "embedding").float())
