"""The peers of a stage to which one microbatch can be given, and those that it leaves alone for a while.

Made by Retries, which decides for how long a peer is left alone. The next peer comes from the router, which collects
what all microbatches of this process learn about the stage. Never waits.
"""

from swarm.errors import SwarmError
from swarm.hop.obstacle import Obstacle, left_alone
from swarm.machine.clock import Clock
from swarm.routing.peer_queue import LeftAlone
from swarm.routing.router import Router
from swarm.types import PeerId, PeerRecord

SHORTEST_WAIT_SECONDS = 0.005
"""The shortest wait before a peer is looked for again, when none can be asked."""
NOBODY_SECONDS = 1.0
"""If no peer can be asked for longer than this, the user gets a message."""
STUCK_SECONDS = 4.0
"""If no peer takes a microbatch for this long, although some can be asked now and then, the user gets a message too."""
PAUSE_SECONDS = 1.0
"""How long a microbatch is kept from a peer that failed it."""


class Candidates:
    """The peers of one stage, as one microbatch sees them."""

    def __init__(self, stage: int, router: Router, clock: Clock, *, retry_seconds: float) -> None:
        """
        Args:
            retry_seconds: the longest wait before asking again when no peer can be asked.
        """
        self._stage = stage
        self._router = router
        self._clock = clock
        self._retry_seconds = retry_seconds
        self._left_alone: dict[PeerId, LeftAlone] = {}
        """Peers that are not asked before a certain time."""
        self._stuck_since: float | None = None
        """The first time at which there was no peer to ask; None if there was always one, or a peer has taken the
        microbatch since."""

    def choose(self, num_samples: int, *, prefer: PeerId | None) -> PeerRecord | None:
        """Choose the peer to ask now; None if there is none."""
        now = self._clock.monotonic()
        self._left_alone = {peer: each for peer, each in self._left_alone.items() if each.until > now}
        preferred = [] if prefer is None else [prefer]
        record = self._router.choose(self._stage, num_samples, exclude=self._left_alone.keys(), prefer=preferred)
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
        """Note that a peer has taken the microbatch."""
        self._stuck_since = None

    def leave_alone(self, record: PeerRecord, error: SwarmError, seconds: float) -> None:
        """Do not choose a peer for a while, because of an error."""
        until = self._clock.monotonic() + seconds
        self._left_alone[PeerId(record.peer_id)] = left_alone(record, error, until)

    def has_other(self, peer_id: PeerId) -> bool:
        """Whether another peer can be asked soon."""
        soon = self._clock.monotonic() + PAUSE_SECONDS
        later = {other for other, each in self._left_alone.items() if each.until > soon}
        return any(other not in later for other in self._router.others(peer_id))

    def obstacle(self) -> Obstacle | None:
        """Why there is no peer to ask; None if there will soon be one, or a peer has taken the microbatch."""
        if self._stuck_since is None:
            return None
        now = self._clock.monotonic()
        available_seconds = self._router.next_available_seconds(self._stage)
        if available_seconds is None:
            return Obstacle(num_peers=0)
        is_stuck = now - self._stuck_since >= STUCK_SECONDS
        at_once = min((each.until for each in self._left_alone.values()), default=now) <= now + NOBODY_SECONDS
        if available_seconds <= NOBODY_SECONDS and at_once and not is_stuck:
            return None
        left = {each.record.peer_id: each for each in self._router.left_alone(self._stage)}
        for peer_id, own in self._left_alone.items():
            known = left.get(peer_id)
            left[peer_id] = own if known is None or own.until > known.until else known
        peers = [left[record.peer_id] for record in self._router.records(self._stage) if record.peer_id in left]
        obstacle = Obstacle.of(peers, now)
        if len(peers) < self._router.num_peers(self._stage) or (obstacle.seconds <= NOBODY_SECONDS and not is_stuck):
            return None
        return None if obstacle.is_business and not is_stuck else obstacle
