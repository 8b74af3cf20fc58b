"""The hash chain over a stage's committed rounds.

Used by averaging, which makes it longer, and by the audit, which checks it. Pure.
"""

import hashlib
from collections.abc import Sequence


def next_lineage(
    previous: str, round_number: int, digest: str, members: Sequence[str], *, total_squared_norm: float,
    partners: Sequence[str],
) -> str:  # fmt: skip
    """The hash chain's next link, 64 hexadecimal digits: a round's result, and all else that the next state depends on.

    Args:
        total_squared_norm: what the gradient is clipped by.
        partners: digests of the results that a shared block's average is made of.
    """
    parts = [previous, str(round_number), digest, *members, float(total_squared_norm).hex(), *partners]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
