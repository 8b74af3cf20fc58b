"""Dropout follows from its key: masks are a hash of key and place, the same on every processor."""

import hashlib
import math

import pytest
import torch

from swarm.model.masks import Dropout, DropoutKey, random_mask

CPU = torch.device("cpu")
KEY = DropoutKey(seed=1, microbatch=7)


def _reference(num_elements: int, probability: float, key: str) -> list[bool]:
    """lowbias32 with a second word of the key between its rounds, in Python's own numbers."""
    digest = hashlib.sha256(key.encode()).digest()
    first, second = (int.from_bytes(digest[start : start + 4], "little") for start in (0, 4))
    halves = []
    for index in range(-(-num_elements // 2)):
        word = index ^ first
        word = (word ^ word >> 16) * 0x7FEB352D & 0xFFFFFFFF ^ second
        word = (word ^ word >> 15) * 0x846CA68B & 0xFFFFFFFF
        word ^= word >> 16
        halves += [word & 0xFFFF, word >> 16]
    # The halves are compared as signed numbers, of which half are negative.
    return [(half ^ 0x8000) < round(probability * 65536) for half in halves[:num_elements]]


@pytest.mark.parametrize("shape", [(1,), (2, 3, 5), (4, 8, 32)])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.97])
def test_a_mask_is_the_hash_of_key_and_place(shape: tuple[int, ...], probability: float) -> None:
    for key in ("1/7/embedding", "1/8/layers.0.attention"):
        mask = random_mask(shape, probability, CPU, *key.split("/"))
        assert mask.shape == shape
        assert mask.flatten().tolist() == _reference(mask.numel(), probability, key)


@pytest.mark.parametrize(("probability", "num_true"), [(0.0, 0), (1 / 65536, 2), (1.0, 131_072)])
def test_probabilities_at_the_ends(probability: float, num_true: int) -> None:
    """The share is exact to 1/65,536, although some of the possible words are drawn twice and some never."""
    mask = random_mask((131_072,), probability, CPU, "key")
    assert int(mask.sum()) == pytest.approx(num_true, abs=6 if 0 < probability < 1 else 2)


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_masks_are_as_good_as_chance(probability: float) -> None:
    """Means, and correlations of neighbouring elements, microbatches and sites, within 5 standard deviations."""
    size, width = 1 << 16, 256
    masks = {
        (microbatch, site): random_mask((size,), probability, CPU, 3, microbatch, site)
        for microbatch in range(32)
        for site in ("layers.0.attention", "layers.0.feed_forward")
    }
    deviation = (probability * (1 - probability)) ** 0.5
    centred = {key: (mask.float() - probability) / deviation for key, mask in masks.items()}
    for (microbatch, site), values in centred.items():
        others = [values.roll(lag) for lag in (1, 2, 3, width, 2 * width)]
        others += [centred[other] for other in ((microbatch + 1, site), (microbatch ^ 16, site)) if other in centred]
        others.append(centred[microbatch, "layers.0.attention" if "feed" in site else "layers.0.feed_forward"])
        assert abs(float(values.mean())) < 5 / size**0.5
        for other in others:
            if other is not values:
                assert abs(float((values * other).mean())) < 5 / size**0.5
    # If some places were dropped too often, the counts would spread more than chance allows.
    counts = torch.stack([mask.float() for mask in masks.values()]).sum(0)
    spread = float(counts.var()) / (len(masks) * probability * (1 - probability))
    assert spread == pytest.approx(1.0, abs=5 * (2 / size) ** 0.5 + 0.01)


def test_dropout_follows_from_its_key_and_not_from_the_global_state() -> None:
    hidden = torch.ones(4, 8, 32)
    torch.manual_seed(0)
    first = Dropout(0.5, "layers.0.attention")(hidden, KEY)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(first, Dropout(0.5, "layers.0.attention")(hidden, KEY))
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
    same = Dropout(0.5, "layers.0.attention")(hidden, KEY) == Dropout(0.5, site)(hidden, key)
    # Independent masks of probability one half agree on half of the 1024 elements, give or take 5 deviations.
    assert abs(same.float().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(1024)


def test_dropout_masks_stay_what_they_were() -> None:
    """A peer on another device or of another release must compute a microbatch again with the same masks."""
    kept = Dropout(0.5, "embedding")(torch.ones(1, 2, 8), KEY)[0] > 0
    assert kept.int().tolist() == [[1, 0, 1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 1, 1, 0]]


def test_dropout_zeroes_the_share_it_is_told_and_keeps_the_mean() -> None:
    dropped = Dropout(0.2, "embedding")(torch.ones(16, 32, 32), KEY)
    assert set(dropped.flatten().tolist()) == {0.0, 1.25}
    assert (dropped == 0).float().mean().item() == pytest.approx(0.2, abs=0.02)


def test_dropout_without_a_key_is_the_identity() -> None:
    hidden = torch.randn(2, 3, 4)
    assert Dropout(0.5, "embedding")(hidden, None) is hidden


def test_dropout_masks_are_the_same_in_every_dtype() -> None:
    hidden = torch.ones(2, 8, 32)
    full = Dropout(0.5, "embedding")(hidden, KEY)
    assert torch.equal(full, Dropout(0.5, "embedding")(hidden.bfloat16(), KEY).float())
