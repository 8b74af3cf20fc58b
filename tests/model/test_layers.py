"""Dropout that follows from its key."""

import math

import pytest
import torch

from swarm.model.layers import DropoutKey, dropout

KEY = DropoutKey(seed=1, microbatch=7)
CPU = torch.device("cpu")


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
