"""What a hop tells its caller: while a microbatch is under way, and in the end; and what it takes for an answer."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from swarm.errors import MalformedMessage, PeerUnavailable
from swarm.hop.obstacle import Obstacle
from swarm.rpc.stream import Stream
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PeerId

logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]

ACK_SECONDS = 5.0
"""Longest wait until an acknowledgement has been taken."""


class HopListener:
    """Hears how a microbatch fares downstream. The default ignores everything."""

    def progress(self, stage: int, *, obstacle: Obstacle | None) -> None:
        """`stage` is the deepest one that is being waited for; `obstacle`: why none of its peers takes work now."""

    def routed(self, route: Mapping[int, PeerId]) -> None:
        """The route downstream changed."""


@dataclass(eq=False)
class HopReply:
    """A microbatch's answer. Its stream stays open until `ack` or `close`."""

    loss: float
    tensors: Tensors
    route: Mapping[int, PeerId]
    num_reroutes: int
    num_busy: int
    """How often a peer of this hop had no room; one that merely left it to others is not counted."""
    _call: Stream = field(repr=False)

    async def ack(self) -> None:
        """Tell the peer that its answer counts. A lost ack ends in "missing" at that peer, never in "double"."""
        try:
            await self._call.finish(pb.TrainRequest(ack=pb.Ack()), ACK_SECONDS)
        except PeerUnavailable as error:
            logger.debug("an ack was lost: %s", error)
        finally:
            self._call.cancel()

    def close(self) -> None:
        """Give the answer up: the peer will roll back what it accumulated."""
        self._call.cancel()


@contextmanager
def well_formed() -> Iterator[None]:
    """A block that looks at a reply. What is wrong with the reply is its sender's fault: another peer may answer
    well."""
    try:
        yield
    except MalformedMessage as error:
        raise PeerUnavailable(f"a malformed reply: {error}") from None
