"""Sums up which addresses of this peer others reached when they dialled it back. Used by reach.py. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from swarm.rpc.endpoint import endpoint_of
from swarm.rpc.entry import versions
from swarm.rpc.v1 import meeting_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the peers that dialled back reached.

    Attributes:
        endpoints: direct endpoints that were reached, the best first. If there are any, the endpoints that no peer
            could try follow.
        dht_endpoints: the endpoints of the DHT's node that were reached, in the same order.
        num_asked: how many peers dialled back.
        num_reached: how many of them reached an endpoint.
    """

    endpoints: tuple[str, ...]
    dht_endpoints: tuple[str, ...]
    num_asked: int
    num_reached: int

    @classmethod
    def unchecked(cls, endpoints: tuple[str, ...]) -> Self:
        """The endpoints of a peer that nobody has dialled back."""
        return cls(endpoints=endpoints, dht_endpoints=(), num_asked=0, num_reached=0)

    @property
    def is_hidden(self) -> bool:
        """Whether some of the peers that dialled back did not reach this one."""
        return self.num_reached < self.num_asked

    @property
    def needs_tunnels(self) -> bool:
        """Whether some peers need a meeting point to reach this one: it is hidden, or is reached by one version of IP
        only, so that peers that have only the other one need a meeting point that has both."""
        return self.is_hidden or len(versions(self.endpoints)) < 2

    @classmethod
    def of(cls, named: pb.CheckRequest, replies: Sequence[pb.CheckReply]) -> Self:
        """Sum up the answers.

        An endpoint that this peer named counts if one peer reached it. An endpoint at the address from which this peer
        was seen to call counts if more than half of the peers reached it. An endpoint that none of them could try,
        because they have another version of IP, stays named. Other endpoints in the answers are ignored.
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

    def is_doubtful(self, former: Self | None) -> bool:
        """Whether others should soon be asked again: an endpoint is no longer reached, was not reached at the first
        attempt, or has become reachable. Each of these may be an accident."""
        if former is None:
            return not (self.endpoints and self.dht_endpoints)
        return self.endpoints != former.endpoints or bool(self.dht_endpoints) != bool(former.dht_endpoints)


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
