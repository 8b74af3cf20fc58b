"""Whether enough of a round's members are there to commit it.

Used by averaging/averager, before an attempt and, through its leader, once the members have begun; and by the
simulator. Pure.
"""

from collections.abc import Collection
from typing import Literal

Rule = Literal["available", "majority"]


def has_quorum(
    rule: Rule, present: Collection[str], *, last_members: Collection[str], announced: Collection[str]
) -> bool:
    """Whether those who are present may commit a round.

    Args:
        last_members: of the round before; empty for a peer that knows of none. Most of them have to be there if `rule`
            says majority.
        announced: all that are, this peer included: who has to be asked as long as no round is known.
    """
    if rule == "available":
        return True
    electorate = set(last_members or announced)
    return 2 * len(electorate & set(present)) > len(electorate)
