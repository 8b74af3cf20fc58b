"""The hash chain over a stage's committed rounds.

Used by averaging, which makes it longer, and by the audit, which checks it. Pure.
"""

import hashlib
from collections.abc import Sequence


def next_lineage(previous: str, round_number: int, digest: str, members: Sequence[str]) -> str:
    """The hash chain's next link, 64 hexadecimal digits."""
    return hashlib.sha256("\n".join([previous, str(round_number), digest, *members]).encode()).hexdigest()
