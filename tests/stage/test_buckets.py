"""Buckets of gradients: sums and means over samples."""

import torch

from tests.stage.linear import assert_same, gradients, weights_in


def test_a_bucket_is_a_mean_over_samples_and_gives_back_what_is_taken_out() -> None:
    bucket = weights_in("synchronous").buckets.open()
    bucket.add(gradients(0).values(), 2)
    bucket.add(gradients(1).values(), 6)
    assert_same(bucket.mean(), {n: (gradients(0)[n] + 3 * gradients(1)[n]) / 4 for n in gradients(0)})
    bucket.add(gradients(1).values(), -6)
    assert bucket.num_samples == 2
    for name, value in bucket.mean().items():
        torch.testing.assert_close(value, gradients(0)[name], rtol=0, atol=1e-6)


def test_the_mean_of_nothing_is_zero() -> None:
    assert all(not value.any() for value in weights_in("synchronous").buckets.open().mean().values())
