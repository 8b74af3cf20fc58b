"""The hash chain over a stage's committed rounds.

Averaging extends it, and the audit checks it. Pure.
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
    """The chain's next link, 64 hexadecimal digits: a hash over all that the state after the round depends on.

    Args:
        digest: the digest of the round's result.
        total_squared_norm: the squared norm by which the gradient is clipped.
        partners: digests of the results that a shared block's average is made of.
    """
    parts = [previous, str(round_number), digest, *members, float(total_squared_norm).hex(), *partners]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
