"""Buckets of gradients: sums and means over targets."""

from swarm.training.samples import Amount
from tests.stage.linear import weights_in


def test_means_are_made_one_by_one() -> None:
    """A GPU would otherwise hold all of them beside the sums."""
    bucket = weights_in("synchronous").buckets.open()
    means = bucket.means()
    next(means)
    list(bucket.sums.values())[-1].fill_(3.0)
    bucket.amount = Amount(1, 1)
    assert all(bool((value == 3.0).all()) for _, value in means)
