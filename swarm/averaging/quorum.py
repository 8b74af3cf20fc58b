"""Whether enough of a round's members are there to commit it.

Used by averaging/averager, before an attempt and, through its leader, once the members have begun; and by the
simulator. Pure.
"""

from collections.abc import Callable, Collection

from swarm.config import Quorum


def has_quorum(
    quorum: Quorum, present: Collection[str], *, last_members: Collection[str], announced: Callable[[], Collection[str]]
) -> bool:
    """Whether those who are present may commit a round.

    With a majority no two parts of a group commit the same round, as long as its members stay: one that is started
    again forgets what it had prepared, and may be in the majority for another result of that round.

    Args:
        last_members: of the round before; empty for a peer that knows of none. Most of them have to be there if a
            majority is wanted.
        announced: gives all that are, this peer included; asked only where they count, as long as no round is known.
    """
    if quorum == "available":
        return True
    electorate = set(last_members or announced())
    return 2 * len(electorate & set(present)) > len(electorate)
