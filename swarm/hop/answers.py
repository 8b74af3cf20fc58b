"""A hop's messages to its caller: the listener for a microbatch under way, and the final reply. Also rejects malformed
replies."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from swarm.errors import MalformedMessage, PeerUnavailable
from swarm.hop.obstacle import Obstacle
from swarm.rpc.ask import Stream
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PeerId

logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]

ACK_SECONDS = 5.0
"""Longest wait until the peer has taken an acknowledgement."""


class HopListener:
    """Is called about a microbatch's progress downstream. The methods here do nothing."""

    def progress(self, stage: int, *, obstacle: Obstacle | None) -> None:
        """Called with the deepest stage that is waited for, and the reason if none of its peers takes work."""

    def routed(self, route: Mapping[int, PeerId]) -> None:
        """Called when the route downstream has changed."""


@dataclass(eq=False)
class HopReply:
    """A microbatch's answer. Its stream stays open until `ack` or `close`."""

    loss: float
    tensors: Tensors
    route: Mapping[int, PeerId]
    num_reroutes: int
    num_busy: int
    """How often a peer of this hop had no room. Peers that merely left the microbatch to others are not counted."""
    _call: Stream = field(repr=False)

    async def ack(self) -> None:
        """Tell the peer that its answer counts. If this ack is lost, the peer may not count the microbatch, but it
        never counts it twice."""
        try:
            await self._call.finish(pb.TrainRequest(ack=pb.Ack()), ACK_SECONDS)
        except PeerUnavailable as error:
            logger.debug("an ack was lost: %s", error)
        finally:
            self._call.cancel()

    def close(self) -> None:
        """Give the answer up. The peer then rolls back what it accumulated."""
        self._call.cancel()


@contextmanager
def well_formed() -> Iterator[None]:
    """Turn a MalformedMessage in the block, which reads a reply, into PeerUnavailable: another peer is asked then."""
    try:
        yield
    except MalformedMessage as error:
        raise PeerUnavailable(f"a malformed reply: {error}") from None
