"""Buckets of gradients: sums and means over targets."""

import torch

from swarm.training.samples import Amount
from tests.stage.linear import assert_same, gradients, weights_in


def test_a_bucket_is_a_mean_over_targets_and_gives_back_what_is_taken_out() -> None:
    bucket = weights_in("synchronous").buckets.open()
    bucket.add(gradients(0).values(), Amount(2, 3))
    bucket.add(gradients(1).values(), Amount(2, 5))
    assert_same(dict(bucket.means()), {n: (gradients(0)[n] + gradients(1)[n]) / 8 for n in gradients(0)})
    bucket.take_out(gradients(1).values(), Amount(2, 5))
    assert bucket.amount == Amount(2, 3)
    for name, value in bucket.means():
        torch.testing.assert_close(value, gradients(0)[name] / 3, rtol=0, atol=1e-6)


def test_samples_without_a_target_count_and_weigh_nothing() -> None:
    bucket = weights_in("synchronous").buckets.open()
    zeros = {name: torch.zeros_like(value) for name, value in gradients(0).items()}
    bucket.add(zeros.values(), Amount(2, 0))
    assert (bucket.num_samples, dict(bucket.means()).keys()) == (2, zeros.keys())
    assert_same(dict(bucket.means()), zeros)


def test_the_mean_of_nothing_is_zero() -> None:
    assert all(not value.any() for _, value in weights_in("synchronous").buckets.open().means())


def test_means_are_made_one_by_one() -> None:
    """A GPU would otherwise hold all of them beside the sums."""
    bucket = weights_in("synchronous").buckets.open()
    means = bucket.means()
    next(means)
    list(bucket.sums.values())[-1].fill_(3.0)
    bucket.amount = Amount(1, 1)
    assert all(bool((value == 3.0).all()) for _, value in means)
