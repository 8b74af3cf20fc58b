"""Runs one of the project's programs with another rule to choose peers, for the bench `heterogeneous`.

    python -m scripts.benches.sides.routing_program POLICY NAME ARGUMENTS...

POLICY is `queue` (changes nothing), `round_robin` or `random`. Only the cost that the queue charges for a choice is
replaced. Peers that are busy, banned or already asked are left out as usual. So the other rules also know when to leave
a peer alone; what they do not know is how fast it is.
"""

import heapq
import random
import sys
from collections.abc import Callable
from typing import Any

from swarm.routing.peer_queue import PeerQueue

COSTS: dict[str, Callable[[random.Random], float] | None] = {
    "queue": None,
    # With equal charges, the peer that was chosen the longest time ago has the smallest finish time.
    "round_robin": lambda rng: 1.0,
    # The remainder of an exponential time is distributed like the whole time, so every peer is equally likely to have
    # the smallest one.
    "random": lambda rng: rng.expovariate(1.0),
}


def replace_choice(cost: Callable[[random.Random], float]) -> None:
    """Make every queue of this process charge what `cost` returns, whichever peer is chosen."""

    def charge(self: Any, member: Any, num_samples: int) -> Any:
        member.priority = max(member.priority, self._virtual_now) + cost(self._rng)
        return member.record

    def enter(self: Any, member: Any) -> None:
        member.priority = max(member.priority, self._virtual_now + cost(self._rng))
        heapq.heappush(self._ready, (member.priority, member.ticket, member))

    PeerQueue._charge = charge  # type: ignore[method-assign]
    PeerQueue._enter = enter  # type: ignore[method-assign]


if __name__ == "__main__":
    policy, program = sys.argv[1:3]
    if (cost := COSTS[policy]) is not None:
        replace_choice(cost)
    sys.argv = [f"swarm-{program}", *sys.argv[3:]]
    from peers import commands

    getattr(commands, program)()
