"""The hash chain over a stage's committed rounds.

Averaging makes it longer, and the audit checks it. Pure.
"""

import hashlib
from collections.abc import Sequence


def next_lineage(
    previous: str,
    round_number: int,
    digest: str,
    members: Sequence[str],
    *,
    total_squared_norm: float,
    partners: Sequence[str],
) -> str:
    """The chain's next link, 64 hexadecimal digits: over a round's result, and all else that its state depends on.

    Args:
        total_squared_norm: what the gradient is clipped by.
        partners: digests of the results that a shared block's average is made of.
    """
    parts = [previous, str(round_number), digest, *members, float(total_squared_norm).hex(), *partners]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
