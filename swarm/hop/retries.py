"""Decides what a hop does when a peer fails a microbatch or has no room for it, and when the hop gives up.

It reports failed and busy peers to the router, and decides how long this microbatch leaves them alone.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from swarm.config import RunConfig
from swarm.errors import (
    DeadlineExceeded,
    IncompatibleVersion,
    MalformedMessage,
    NotAllowed,
    NotReady,
    Overloaded,
    PeerUnavailable,
    RetriesExhausted,
    RoundGone,
    RoundMismatch,
    SwarmError,
    WrongRun,
    WrongStage,
)
from swarm.hop.answers import Obstacle, Route, left_alone, reason_of
from swarm.machine.clock import Clock
from swarm.machine.words import Repeats, counted
from swarm.routing.peer_queue import LeftAlone
from swarm.routing.router import Router
from swarm.rpc.ask import address_of
from swarm.rpc.channels import ChannelPool, Patience
from swarm.rpc.local import LocalBlock
from swarm.rpc.v1.stage_pb2 import Address
from swarm.types import Block, PeerId, PeerRecord

logger = logging.getLogger(__name__)

SHORTEST_WAIT_SECONDS = 0.005
NOBODY_SECONDS = 1.0
"""If no peer can be asked for longer than this, the user gets a message."""
STUCK_SECONDS = 4.0
"""If no peer takes a microbatch for this long, although some can be asked now and then, the user gets a message too."""
PAUSE_SECONDS = 1.0
"""How long a microbatch is kept from a peer that failed it."""
STALL_FACTOR = 4.0
"""The hop waits this many times longer for the next peer than the peer, with its queue, was expected to take."""
MOST_DOUBLINGS = 3
"""How often the longest wait for the next peer is doubled at most, for a microbatch that stalls again and again."""
MOST_SENT_ON = 4
"""How many peers may leave a microbatch to others, because something waits there already; the next one takes it, if it
has a slot. Each of them costs a round trip, and more of them would bring little (docs/simulation.md)."""
ENOUGH_PEERS = 4
"""Once this many peers have said that they no longer have a round's weights, no further one is asked."""
PEERS_TO_SEND_ON = 4
"""A microbatch may be left to others once for each group of this many peers at the stage. If there are few peers, each
sender gets replies from all of them often enough to choose well itself, unless a round is only a few microbatches."""
FEW_EACH = 2
"""A round with at most this many microbatches for each peer of the stage is short. In a short round it matters which
peer gets one microbatch more, and no sender knows what the others have just sent."""
EMPTY_SECONDS = 5.0
"""In a run of several paths: how long a microbatch waits at most for a block that has no peers, or only peers that
failed. Microbatches that come later wait no more, until one of the peers has answered."""
AS_FAST = 2.0
"""A peer that takes at most this many times as long as another one finishes a microbatch no later than that one would
finish a second one. Of few peers only such count as others: a much slower one would take the microbatch although the
fast peer, which was chosen, is done with it sooner."""


@dataclass(frozen=True, kw_only=True)
class HopLimits:
    """The time limits of a hop, its limit of failures, and the size of a round."""

    open_seconds: float = 10.0
    """Longest wait for a peer's first answer, when no tensor is sent before it."""
    silence_seconds: float = 15.0
    """Longest wait for any sign of life from a peer that accepted; one comes every 3 s."""
    stall_seconds: float = 120.0
    """Longest wait for the next peer's own work, unless that peer is known to need longer."""
    retry_seconds: float = 0.25
    """Longest wait before asking again when no peer can be asked."""
    max_failures: int = 12
    """How many peers may fail a microbatch before it is given up. Busy answers and empty stages do not count, nor peers
    that join, move, leave, or lack a round's weights."""
    round_microbatches: int | None = None
    """None with DiLoCo."""
    empty_seconds: float = math.inf
    """Longest wait for a block that has no peers, or only banned ones."""

    @classmethod
    def of(cls, config: RunConfig, block: Block) -> Self:
        """The limits of hops to a block. With DiLoCo a microbatch does not wait for a block without peers if the run
        has other paths, because it would keep the room of theirs."""
        waits = config.rounds.synchronous or len(config.paths) == 1
        return cls(
            round_microbatches=len(config.microbatches_after(0, block)) if config.rounds.synchronous else None,
            empty_seconds=math.inf if waits else EMPTY_SECONDS,
        )


@dataclass(frozen=True, kw_only=True)
class HopContext:
    """What the parts of a hop to one block share."""

    run_id: str
    block: Block
    router: Router
    channels: ChannelPool
    clock: Clock
    limits: HopLimits = HopLimits()
    own: Callable[[PeerRecord], LocalBlock | None] = lambda _: None
    """Finds the block that a record announces, if this very process serves it: it is called without gRPC."""

    def address(self, path: int = 0) -> Address:
        return address_of(self.run_id, self.block, path)

    def patience(self, record: PeerRecord, num_bytes: int) -> Patience:
        """What a call that carries so many bytes in one direction is given."""
        return Patience() if self.own(record) is not None else self.channels.patience(record, num_bytes)


class Candidates:
    """The peers of one block, as one microbatch sees them."""

    def __init__(self, context: HopContext) -> None:
        self._block = context.block
        self._router = context.router
        self._clock = context.clock
        self._retry_seconds = context.limits.retry_seconds
        self._left_alone: dict[PeerId, LeftAlone] = {}
        self._stuck_since: float | None = None
        """The first time at which there was no peer to ask; None if there was always one, or a peer has taken the
        microbatch since."""

    def choose(self, num_samples: int, *, prefer: PeerId | None) -> PeerRecord | None:
        """Choose the peer to ask now; None if there is none."""
        now = self._clock.monotonic()
        self._left_alone = {peer: each for peer, each in self._left_alone.items() if each.until > now}
        record = self._router.choose(self._block, num_samples, exclude=self._left_alone.keys(), prefer=prefer)
        if record is None and self._stuck_since is None:
            self._stuck_since = now
        return record

    def wait_seconds(self) -> float:
        """The seconds to wait when there is no peer to ask. They are few, because a new peer may come at any time."""
        seconds = self._retry_seconds
        if self._left_alone:
            first = min(each.until for each in self._left_alone.values()) - self._clock.monotonic()
            seconds = min(seconds, max(first, SHORTEST_WAIT_SECONDS))
        return seconds

    def accepted(self) -> None:
        self._stuck_since = None

    def leave_alone(self, record: PeerRecord, error: SwarmError, seconds: float) -> None:
        until = self._clock.monotonic() + seconds
        self._left_alone[PeerId(record.peer_id)] = left_alone(record, error, until)

    def has_other(self, peer_id: PeerId) -> bool:
        soon = self._clock.monotonic() + PAUSE_SECONDS
        later = {other for other, each in self._left_alone.items() if each.until > soon}
        return any(other not in later for other in self._router.others(self._block, peer_id))

    def obstacle(self) -> Obstacle | None:
        """Why there is no peer to ask; None if there will soon be one, or a peer has taken the microbatch."""
        if self._stuck_since is None:
            return None
        now = self._clock.monotonic()
        available_seconds = self._router.next_available_seconds(self._block)
        if available_seconds is None:
            return Obstacle(num_peers=0)
        is_stuck = now - self._stuck_since >= STUCK_SECONDS
        at_once = min((each.until for each in self._left_alone.values()), default=now) <= now + NOBODY_SECONDS
        if available_seconds <= NOBODY_SECONDS and at_once and not is_stuck:
            return None
        left = {each.record.peer_id: each for each in self._router.left_alone(self._block)}
        for peer_id, own in self._left_alone.items():
            known = left.get(peer_id)
            left[peer_id] = own if known is None or own.until > known.until else known
        peers = [left[record.peer_id] for record in self._router.records(self._block) if record.peer_id in left]
        obstacle = Obstacle.of(peers, now)
        if len(peers) < self._router.num_peers(self._block) or (obstacle.seconds <= NOBODY_SECONDS and not is_stuck):
            return None
        return None if obstacle.is_business and not is_stuck else obstacle


class Retries:
    """The state of one microbatch that is kept from attempt to attempt.

    Attributes:
        has_others: whether the peer that is being asked may leave the microbatch to others.
        is_refused: whether a peer had no room for it, and none has taken it since.
        num_sent_on: how often a peer left it to others.
    """

    def __init__(
        self, context: HopContext, repeats: Repeats, hints: Mapping[Block, PeerId] | None = None, *,
        without: set[PeerId] | None = None,
    ) -> None:  # fmt: skip
        """`repeats` knows which failures, of any microbatch, the log has named a moment ago. Peers that say that they
        lack the weights of the round are added to those in `without`."""
        self.candidates = Candidates(context)
        self.route = Route(context.block, hints or {})
        self._block = context.block
        self._router = context.router
        self._channels = context.channels
        self._limits = context.limits
        self._repeats = repeats
        self._without = set() if without is None else without
        self.has_others = False
        self.is_refused = False
        self.num_failures = 0
        self.num_busy = 0
        self.num_sent_on = 0
        self._num_stalls = 0
        self._num_not_ready = 0
        self._num_refusals = 0

    def choose(self, num_samples: int) -> PeerRecord | None:
        """Choose the peer to ask now; None if there is none. A peer that knows the microbatch comes first."""
        return self.candidates.choose(num_samples, prefer=self.route.own)

    # -- an attempt that succeeds --------------------------------------------------------------------------------------

    def offered(self, peer_id: PeerId) -> None:
        """Note that a peer is about to be asked, and decide whether it may leave the microbatch to others."""
        # What waits in this very process is no reason to go elsewhere: only a lack of slots is.
        stays = peer_id in (self.route.own, self._router.own)
        self.has_others = not stays and self.num_sent_on < self._most_sent_on(peer_id)

    def _most_sent_on(self, peer_id: PeerId) -> int:
        num_peers = self._router.num_peers(self._block)
        num_microbatches = self._limits.round_microbatches
        is_short = num_microbatches is not None and num_microbatches <= FEW_EACH * num_peers
        if num_peers >= MOST_SENT_ON * PEERS_TO_SEND_ON or not (is_short or most_sent_on(num_peers)):
            return most_sent_on(num_peers)
        own = self._router.expected_seconds(self._block, peer_id, 1) or 0.0
        others = [
            self._router.expected_seconds(self._block, other, 1) or 0.0
            for other in self._router.others(self._block, peer_id)
        ]
        num_as_fast = sum(seconds <= AS_FAST * own for seconds in others)
        return num_as_fast if is_short and num_peers < PEERS_TO_SEND_ON else most_sent_on(1 + num_as_fast)

    def accepted(self) -> None:
        self.is_refused = False
        self.candidates.accepted()

    def require_no_stall(self, peer_id: PeerId, num_samples: int, seconds: float) -> None:
        """Raise DeadlineExceeded if the microbatch has waited too long for this peer's own work.

        A slow peer with a full queue is not stalled. After each stall of the microbatch twice as long is allowed, since
        the next peer may never have answered, and then nothing is known of its speed.
        """
        expected = self._router.expected_seconds(self._block, peer_id, num_samples) or 0.0
        patience = max(self._limits.stall_seconds, STALL_FACTOR * expected)
        if seconds > patience * 2.0 ** min(self._num_stalls, MOST_DOUBLINGS):
            self._num_stalls += 1
            raise DeadlineExceeded(f"no result after {seconds:.0f} s")

    # -- an attempt that comes to nothing ------------------------------------------------------------------------------

    def note(self, record: PeerRecord, error: SwarmError) -> None:
        """Take note of why a peer did not answer, so that another one is asked, or the same one later.

        Raises MalformedMessage if a second peer calls the message malformed as well, or there is no second peer,
        RoundGone if peer after peer lacks the round's weights, and RetriesExhausted if too many peers have failed.
        """
        peer_id = PeerId(record.peer_id)
        if isinstance(error, RoundMismatch):
            self._without.add(peer_id)
            if len(self._without) >= min(ENOUGH_PEERS, self._router.num_peers(self._block)):
                raise RoundGone(f"no peer of stage {self._block} has that round's weights any more: {error}")
        if isinstance(error, Overloaded):
            self._busy(record, error)
            return
        if isinstance(error, MalformedMessage):
            # One peer's answer is not enough, because that peer's own weights may be broken. A second peer has to
            # agree.
            self._num_refusals += 1
            if self._num_refusals > 1 or not self._router.others(self._block, peer_id):
                raise error
        if num := self._repeats.count((peer_id, reason_of(error))):
            often = f", {num} times since this was said last" if num > 1 else ""
            logger.info("stage %s: %s failed: %s%s", self._block, record.display_name, error, often)
        self._ban_if_at_fault(peer_id, error)
        if isinstance(error, PeerUnavailable) and error.is_unreachable:
            self._channels.lost(record)
        self._leave_alone(record, error)
        self._count(error)

    def _busy(self, record: PeerRecord, error: Overloaded) -> None:
        if self.has_others:
            self.num_sent_on += 1
        else:
            self.num_busy += 1
            self.is_refused = True
        self._router.busy(self._block, PeerId(record.peer_id), error.retry_after_seconds, reason_of(error))
        self.candidates.leave_alone(record, error, error.retry_after_seconds)

    def _ban_if_at_fault(self, peer_id: PeerId, error: SwarmError) -> None:
        if isinstance(error, PeerUnavailable):
            self._router.failed(
                self._block,
                peer_id,
                is_gone=error.is_gone,
                is_unreachable=error.is_unreachable,
                reason=reason_of(error),
            )
        elif isinstance(error, NotAllowed | IncompatibleVersion | MalformedMessage):
            # These are faults of the peer as well. If its clock is wrong, this process's token may seem to it to have
            # expired; and a process of another release may listen at its port now.
            self._router.failed(self._block, peer_id, reason=reason_of(error))

    def _leave_alone(self, record: PeerRecord, error: SwarmError) -> None:
        """Ask other peers first for a while, which is longer if this peer is slow and another one can be asked."""
        is_long = isinstance(error, DeadlineExceeded) and self.candidates.has_other(PeerId(record.peer_id))
        self.candidates.leave_alone(record, error, self._limits.stall_seconds if is_long else PAUSE_SECONDS)
        self.route.failed()

    def _count(self, error: SwarmError) -> None:
        if isinstance(error, NotReady):
            self._num_not_ready += 1
            if self._num_not_ready == self._limits.max_failures:
                # Perhaps no peer will ever take it, so the log says why.
                logger.warning("stage %s: nobody can take a microbatch, and it is tried on: %s", self._block, error)
        # Peers that join, move, leave or lack a round's weights say nothing about the others.
        self.num_failures += not isinstance(error, NotReady | WrongStage | WrongRun)
        if self.num_failures >= self._limits.max_failures:
            raise RetriesExhausted(
                f"stage {self._block}: {counted(self.num_failures, 'peer')} failed in a row; the last: {error}"
            )


def most_sent_on(num_peers: int) -> int:
    return min(MOST_SENT_ON, num_peers // PEERS_TO_SEND_ON)
