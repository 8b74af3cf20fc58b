"""What makes two states' lineages differ."""

from collections.abc import Sequence

import pytest

from swarm.training.run_rounds import next_lineage


def _next(
    digest: str = "ab", members: Sequence[str] = ("1", "2"), total_squared_norm: float = 2.0,
    partners: Sequence[str] = (),
) -> str:  # fmt: skip
    return next_lineage("before", 3, digest, members, total_squared_norm=total_squared_norm, partners=partners)


@pytest.mark.parametrize(
    "other",
    [
        _next(digest="cd"),
        _next(members=("1", "3")),
        _next(partners=("ef",)),
        _next(partners=("ef", "01")),
        _next(total_squared_norm=2.0000000000000004),
    ],
)
def test_all_that_the_next_state_depends_on_is_in_it(other: str) -> None:
    """Two parts of a network may decide the same average and clip it by different norms."""
    assert _next() == _next()
    assert other != _next()
