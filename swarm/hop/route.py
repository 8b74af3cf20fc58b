"""A route, which says for each stage which peer works on a microbatch, and its wire form."""

from collections.abc import Iterable, Mapping

from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PeerId


class Route:
    """The peers that work on one microbatch, or worked on it before, from a hop's own stage on.

    Attributes:
        peers: these peers, by stage.
        forward_passed: whether a peer has passed the forward on to the stage after it.
    """

    def __init__(self, stage: int, hints: Mapping[int, PeerId]) -> None:
        """
        Args:
            stage: the hop's own stage.
            hints: peers that worked on the microbatch before, by stage.
        """
        self.peers = dict(hints)
        self.forward_passed = False
        self._stage = stage

    @property
    def own(self) -> PeerId | None:
        """The peer at the hop's own stage that is known to have worked on the microbatch, and may need no tensors."""
        return self.peers.get(self._stage)

    def handed_over(self, peer_id: PeerId) -> None:
        """Note that a peer has all tensors of the microbatch."""
        self.peers = {**self.peers, self._stage: peer_id}

    def progressed(self, peer_id: PeerId, stage: int, downstream: Mapping[int, PeerId]) -> bool:
        """Note which stage a peer says it waits for, and the peers downstream. Returns whether the route changed."""
        self.forward_passed |= stage != self._stage or bool(downstream)
        peers = {**downstream, self._stage: peer_id}
        if not downstream or self.peers == peers:
            return False
        self.peers = peers
        return True

    def failed(self) -> None:
        """Note that the peer at the hop's own stage is not to be asked first any more."""
        self.peers.pop(self._stage, None)


def pack_route(route: Mapping[int, PeerId]) -> list[pb.RouteEntry]:
    return [pb.RouteEntry(stage=stage, peer_id=peer) for stage, peer in sorted(route.items())]


def unpack_route(entries: Iterable[pb.RouteEntry]) -> dict[int, PeerId]:
    return {entry.stage: PeerId(entry.peer_id) for entry in entries}
