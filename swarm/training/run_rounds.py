"""At which rounds a run and its blocks are, by what their peers say, and the lineage that tells runs' branches apart.

Any peer can say any round. So what counts is what most of them say, never the highest that one of them names.
"""

import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Self

from swarm.types import Block

MOST_APART = 4
"""The most rounds by which a block may be ahead of the run. In the synchronous setting it is one: such a block is just
committing a round. With DiLoCo blocks that lost samples with a peer are behind the others until they have caught up."""


@dataclass(frozen=True, kw_only=True)
class RunRounds:
    """The rounds at which a run is.

    Attributes:
        blocks: the round of each block of which a peer has said something.
        middle: a round that more than half of all these peers have reached; 0 if there are none.
    """

    blocks: Mapping[Block, int] = field(default_factory=dict)
    middle: int = 0

    @classmethod
    def of(cls, said: Mapping[Block, Iterable[int]]) -> Self:
        """Conclude it from the rounds that the peers of each block say.

        A block is at the round in the middle of its peers' rounds. If there are two middles, because its peers are just
        committing a round or because one of two does not say the truth, the one that is nearer to the whole run counts,
        and of equally near ones the lower.
        """
        rows = {block: found for block, row in said.items() if (found := list(row))}
        if not rows:
            return cls()
        middle = statistics.median_low(chain.from_iterable(rows.values()))
        middles = {block: (statistics.median_low(row), statistics.median_high(row)) for block, row in rows.items()}
        return cls(
            blocks={block: min(both, key=lambda number: abs(number - middle)) for block, both in middles.items()},
            middle=middle,
        )

    @property
    def latest(self) -> int:
        """The newest round of a block that is at most MOST_APART ahead of the middle."""
        return max((number for number in self.blocks.values() if number <= self.middle + MOST_APART), default=0)


def next_lineage(
    previous: str, round_number: int, digest: str, members: Sequence[str], *, total_squared_norm: float,
    partners: Sequence[str], amended: str = "",
) -> str:  # fmt: skip
    """The chain's next link, 64 hexadecimal digits: a hash over all that the state after the round depends on.

    Args:
        digest: the digest of the round's result.
        total_squared_norm: the squared norm by which the gradient is clipped.
        partners: digests of the results that an average of tied parameters is made of.
        amended: the digest of the newest amendment under which the step is taken.
    """
    parts = [previous, str(round_number), digest, *members, float(total_squared_norm).hex(), *partners]
    if amended:
        parts.append(f"amended {amended}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
