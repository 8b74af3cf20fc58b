"""What a hop tells its caller of a microbatch: which peers work on it, why none takes it now, and the final reply.

A later stage's report about its neighbours is only its claim. It is shown, and nothing is decided by it.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import torch

from swarm.errors import DeadlineExceeded, MalformedMessage, Overloaded, PeerUnavailable, SwarmError, in_one_line
from swarm.routing.peer_queue import LeftAlone
from swarm.rpc.ask import Stream
from swarm.rpc.entry import where
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.wire import parsed
from swarm.types import LARGEST_STAGE, LONGEST_REASON, Block, PeerId, PeerRecord

logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]

ACK_SECONDS = 5.0
MOST_CAUSES, MOST_NAMES = 3, 3
"""How many causes are shown, and how many peers for each."""
LONGEST_CAUSES = 600
"""Of another peer's causes."""
_LONGEST_ID = 64


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """Why a stage cannot be given work, for `seconds` from now.

    Of its announced peers some are in order, but busy, and some silent. The causes name these peers, and why each takes
    nothing; they are empty if the stage has no peer.
    """

    num_peers: int
    num_busy: int = 0
    num_silent: int = 0
    causes: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, peers: Collection[LeftAlone], now: float, *, num_peers: int = 0) -> Self:
        """The obstacle at a stage all of whose peers are left alone, or that has no peer. If it has `num_peers`, which
        are more, nothing is known to be wrong with the others: they count as busy."""
        num_others = max(0, num_peers - len(peers))
        return cls(
            num_peers=len(peers) + num_others,
            num_busy=sum(each.is_busy for each in peers) + num_others,
            num_silent=sum(each.is_silent for each in peers),
            causes=_causes(peers),
            seconds=max(0.0, min((each.until for each in peers), default=now) - now),
        )

    @classmethod
    def read(cls, message: pb.Obstacle) -> Self:
        seconds = message.retry_seconds if math.isfinite(message.retry_seconds) else 0.0
        return cls(
            num_peers=message.num_peers, num_busy=message.num_busy, num_silent=message.num_silent,
            causes=message.causes[:LONGEST_CAUSES], seconds=max(0.0, seconds),
        )  # fmt: skip

    @property
    def is_empty_stage(self) -> bool:
        return self.num_peers == 0

    @property
    def is_business(self) -> bool:
        return 0 < self.num_peers == self.num_busy

    def in_words(self, stage: Block) -> str:
        """One line that says what is wrong, and what happens next or what the user has to do."""
        if self.is_empty_stage:
            return f"stage {stage} has no peer"
        seconds = math.ceil(self.seconds)
        again = f"tried again in {seconds} s" if seconds else "tried again at once"
        who = {1: "the peer", 2: "both peers"}.get(self.num_peers, f"all {self.num_peers} peers")
        if self.is_business:
            verb = "takes" if self.num_peers == 1 else "take"
            return f"{who} of stage {stage} {verb} no work now ({self.causes})"
        if self.num_busy:
            return f"no peer of stage {stage} takes work now ({self.causes}), {again}"
        line = f"{who} of stage {stage} failed just now ({self.causes}), {again}"
        if self.num_silent < self.num_peers:
            return line
        its = ("it runs", "its") if self.num_peers == 1 else ("they run", "their")
        return f"{line}; if {its[0]}, see that {its[1]} --port can be reached, and that {its[1]} --announce is right"


OnWaiting = Callable[[Block, Obstacle], None]


def pack_obstacle(obstacle: Obstacle | None) -> pb.Obstacle | None:
    if obstacle is None:
        return None
    return pb.Obstacle(
        num_peers=obstacle.num_peers, num_busy=obstacle.num_busy, num_silent=obstacle.num_silent,
        causes=obstacle.causes, retry_seconds=obstacle.seconds,
    )  # fmt: skip


def left_alone(record: PeerRecord, error: SwarmError, until: float) -> LeftAlone:
    """Why a peer that has just failed, or had no room, is left alone until a time."""
    is_silent = isinstance(error, PeerUnavailable) and error.is_unreachable
    return LeftAlone(record, reason_of(error), until, isinstance(error, Overloaded), is_silent)


def reason_of(error: SwarmError) -> str:
    """Why a peer failed, in a few words that stay the same while the fault does."""
    if isinstance(error, PeerUnavailable) and error.is_gone:
        return "nothing listens there"
    if isinstance(error, PeerUnavailable) and error.is_unreachable:
        return "no answer"
    if isinstance(error, DeadlineExceeded):
        return "too slow"
    line = in_one_line(error)[:LONGEST_REASON]
    return "".join(character if character.isprintable() else " " for character in line)


def _causes(peers: Collection[LeftAlone]) -> str:
    by_reason: dict[str, list[str]] = {}
    for each in sorted(peers, key=lambda each: (each.record.name, each.record.peer_id)):
        name = each.record.display_name
        place = f"{name} {where(each.record.endpoint)}" if each.is_silent else name
        by_reason.setdefault(each.reason or "it failed", []).append(place)
    told = [f"{_some(names, MOST_NAMES, ', ')}: {reason}" for reason, names in by_reason.items()]
    return _some(told, MOST_CAUSES, "; ")


def _some(texts: list[str], most: int, separator: str) -> str:
    more = len(texts) - most
    return separator.join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def obstacle_of(progress: pb.Progress) -> Obstacle | None:
    return Obstacle.read(progress.obstacle) if progress.HasField("obstacle") else None


class Route:
    """The peers that work on one microbatch, or worked on it before, by block, from a hop's own block on; and whether
    one has passed the forward on to the stage after it."""

    def __init__(self, block: Block, hints: Mapping[Block, PeerId]) -> None:
        self.peers = dict(hints)
        self.forward_passed = False
        self._block = block

    @property
    def own(self) -> PeerId | None:
        """The peer of the hop's own block that has worked on the microbatch, and may need no tensors."""
        return self.peers.get(self._block)

    def handed_over(self, peer_id: PeerId) -> None:
        self.peers = {**self.peers, self._block: peer_id}

    def progressed(self, peer_id: PeerId, stage: int, downstream: Mapping[Block, PeerId]) -> bool:
        """Note which stage a peer says it waits for, and the peers downstream. Returns whether the route changed."""
        self.forward_passed |= stage != self._block.stage or bool(downstream)
        peers = {**downstream, self._block: peer_id}
        if not downstream or self.peers == peers:
            return False
        self.peers = peers
        return True

    def failed(self) -> None:
        self.peers.pop(self._block, None)


def pack_route(route: Mapping[Block, PeerId]) -> list[pb.RouteEntry]:
    return [
        pb.RouteEntry(stage=block.stage, variant=block.variant, peer_id=peer) for block, peer in sorted(route.items())
    ]


def unpack_route(entries: Iterable[pb.RouteEntry], *, after: int = -1) -> dict[Block, PeerId]:
    """The peers that a message names of the stages behind `after`, one of each. Whatever else it names is left out: the
    peer that passes it on, with its own name beside it, would send too much."""
    named = (each for each in entries if after < each.stage <= LARGEST_STAGE and len(each.peer_id) <= _LONGEST_ID)
    by_stage = {each.stage: each for each in named}
    return {Block(each.stage, each.variant): PeerId(each.peer_id) for each in by_stage.values()}


class HopListener:
    """Is called about a microbatch's progress downstream, and remembers it.

    Attributes:
        awaited_stage: the deepest stage that is waited for.
        obstacle: the reason if no peer of that stage takes work now; else None.
        route: the peers of later stages that work on the microbatch.
    """

    def __init__(self, awaited_stage: int = 0) -> None:
        self.awaited_stage = awaited_stage
        self.obstacle: Obstacle | None = None
        self.route: Mapping[Block, PeerId] = {}

    def progress(self, stage: int, *, obstacle: Obstacle | None) -> None:
        self.awaited_stage, self.obstacle = stage, obstacle

    def routed(self, route: Mapping[Block, PeerId]) -> None:
        """Called when the route downstream has changed."""
        self.route = dict(route)

    @property
    def message(self) -> pb.Progress:
        """What it remembers, for the stage before."""
        return pb.Progress(
            stage=self.awaited_stage, route=pack_route(self.route), obstacle=pack_obstacle(self.obstacle)
        )


@dataclass(eq=False)
class HopReply:
    """A microbatch's answer. Its stream stays open until `ack` or `close`."""

    loss: float
    tensors: Tensors
    route: Mapping[Block, PeerId]
    num_reroutes: int
    num_busy: int
    """How often a peer of this hop had no room. Peers that merely left the microbatch to others are not counted."""
    _call: Stream = field(repr=False)
    anchor_round: int | None = None
    """With DiLoCo the round whose anchor the peer says it has used; None if it says nothing."""
    on_ack: Callable[["HopReply", pb.Statement | None], None] = field(default=lambda *_: None, repr=False)
    """Called once the answer counts, with what the peer has signed then."""

    async def ack(self) -> None:
        """Tell the peer that its answer counts. If this ack is lost, the peer may not count the microbatch, but it
        never counts it twice."""
        try:
            last = await self._call.finish(pb.TrainRequest(ack=pb.Ack()), ACK_SECONDS)
            reply = pb.TrainReply() if last is None else parsed(pb.TrainReply, last)[0]
            self.on_ack(self, reply.statement if reply.HasField("statement") else None)
        except (PeerUnavailable, MalformedMessage) as error:
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
