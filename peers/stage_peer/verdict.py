"""What peers found that dialled this one back, summed up. Used by reach.py, which asks them. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from swarm.rpc.endpoint import endpoint_of
from swarm.rpc.v1 import meeting_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What those that dialled back reached.

    Attributes:
        endpoints: direct ones, the best first; behind them those that nobody had a way to, if others were reached.
        dht_endpoints: of the DHT's node, likewise.
        num_asked: how many dialled back.
        num_reached: how many of them reached an endpoint.
    """

    endpoints: tuple[str, ...]
    dht_endpoints: tuple[str, ...]
    num_asked: int
    num_reached: int

    @classmethod
    def of(cls, named: pb.CheckRequest, replies: Sequence[pb.CheckReply]) -> Self:
        """Sum up the answers: of what was named one yes counts, and of addresses that a peer was seen at most of them.

        Nothing else that is answered counts. What none of those could try, who have another version of IP, stays named.
        """
        untried = [end for end in (*named.endpoints, *named.dht_endpoints) if all(end in r.untried for r in replies)]
        return cls(
            endpoints=_reached(named.endpoints, [(reply.observed_host, reply.endpoints) for reply in replies], untried),
            dht_endpoints=_reached(
                named.dht_endpoints, [(reply.observed_host, reply.dht_endpoints) for reply in replies], untried
            ),
            num_asked=len(replies),
            num_reached=sum(bool(reply.endpoints) for reply in replies),
        )


def _reached(
    named: Sequence[str], told: Sequence[tuple[str, Sequence[str]]], untried: Sequence[str]
) -> tuple[str, ...]:
    own = [end for end in named if not end.startswith(":") and any(end in reached for _, reached in told)]
    seen = Counter(
        endpoint
        for host, reached in told
        for port in (int(end[1:]) for end in named if end.startswith(":"))
        if (endpoint := endpoint_of(host, port)) in reached
    )
    reached = dict.fromkeys([*own, *(end for end, count in seen.items() if 2 * count > len(told))])
    return (*reached, *(end for end in named if reached and end in untried))
