"""The wire form of a route, which says for each stage which peer works on a microbatch. Used by hop and servicer."""

from collections.abc import Iterable, Mapping

from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PeerId


def pack_route(route: Mapping[int, PeerId]) -> list[pb.RouteEntry]:
    """A route as messages."""
    return [pb.RouteEntry(stage=stage, peer_id=peer) for stage, peer in sorted(route.items())]


def unpack_route(entries: Iterable[pb.RouteEntry]) -> dict[int, PeerId]:
    """A route from messages."""
    return {entry.stage: PeerId(entry.peer_id) for entry in entries}
