"""What the bench `spans` holds against the blocks that were moved."""

from collections.abc import Sequence

import pytest

from scripts.benches.spans import least_moved
from swarm.types import Block

LIKE = (1.0,) * 4


def _span(first: int, last: int) -> tuple[Block, ...]:
    return tuple(map(Block, range(first, last + 1)))


@pytest.mark.parametrize(
    ("room", "capacities", "before", "least"),
    [
        (4, [1, 4, 16, 4], [_span(0, 3)] * 3 + [None], 0),
        (2, [1, 4], [_span(2, 3), _span(2, 3)], 2),
        (4, [16, 4], [_span(0, 1), _span(2, 3)], 4),
        (4, [16, 4, 4], [_span(0, 1), _span(2, 3), None], 2),
    ],
)  # fmt: skip
def test_no_fewer_blocks_bring_a_swarm_back(
    room: int, capacities: Sequence[float], before: Sequence[tuple[Block, ...] | None], least: int
) -> None:
    assert least_moved(LIKE, room, capacities, before) == least
