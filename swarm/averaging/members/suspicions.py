"""Which peers of a stage cannot be relied on: suspected because a call failed, left out for a while, or given up.

Part of a roster (members/roster). Pure but for its clock.
"""

from collections import Counter
from collections.abc import Collection, Set
from dataclasses import dataclass

from swarm.averaging.timing import Timing
from swarm.machine.clock import Clock
from swarm.types import PeerId

MOST_FAILURES = 5
"""So many attempts may fail because of the same member. After that the others go on without it, whatever it holds,
until it takes part in a round again. If the attempts failed for lack of time, the last one waited eight times as long
as the first."""
PROBE_SHARE = 0.05
"""The pause between calls to a suspected peer, as a share of the time for which it has not answered."""


@dataclass(frozen=True, kw_only=True)
class _Suspicion:
    since: float
    called_at: float
    """When the peer was last called."""


@dataclass(frozen=True, kw_only=True)
class _Exclusion:
    seconds: float
    ends_at: float


class Suspicions:
    """The other peers on which one peer does not rely, and why."""

    def __init__(self, clock: Clock, timing: Timing) -> None:
        self._clock = clock
        self._timing = timing
        self._suspected: dict[PeerId, _Suspicion] = {}
        self._excluded: dict[PeerId, _Exclusion] = {}
        self._num_failures: Counter[PeerId] = Counter()
        """Attempts that failed because of a peer since it took part in a round."""

    @property
    def suspected(self) -> Set[PeerId]:
        """Peers that a call failed to reach, and that have given no sign of life since."""
        return self._suspected.keys()

    def suspect(self, peer_id: PeerId) -> None:
        """Note that a call to a peer failed."""
        now, before = self._clock.monotonic(), self._suspected.get(peer_id)
        self._suspected[peer_id] = _Suspicion(since=before.since if before else now, called_at=now)

    def answered(self, peer_id: PeerId) -> None:
        """Note that a peer gave a sign of life."""
        self._suspected.pop(peer_id, None)

    def suspect_none(self) -> None:
        """Forget all suspicions: all peers have to be asked again."""
        self._suspected.clear()

    def due(self) -> list[PeerId]:
        """Suspected peers that should be called again. The longer a peer has been gone, the less often it is called."""
        now, least = self._clock.monotonic(), self._timing.probe_seconds
        return [
            peer
            for peer, suspicion in self._suspected.items()
            if now - suspicion.called_at >= max(least, PROBE_SHARE * (suspicion.called_at - suspicion.since))
        ]

    def exclude(self, peer_id: PeerId) -> None:
        """Leave a living peer out of this round for a while: each time for twice as long, up to a limit."""
        previous = self._excluded.get(peer_id)
        doubled = 2 * previous.seconds if previous else self._timing.exclusion_seconds
        seconds = min(doubled, self._timing.max_exclusion_seconds)
        self._excluded[peer_id] = _Exclusion(seconds=seconds, ends_at=self._clock.monotonic() + seconds)
        self.failed(peer_id)

    def is_excluded(self, peer_id: PeerId) -> bool:
        """Whether a peer is left out now."""
        exclusion = self._excluded.get(peer_id)
        return exclusion is not None and exclusion.ends_at > self._clock.monotonic()

    def failed(self, peer_id: PeerId) -> None:
        """Note that an attempt failed because of a peer, or committed without it."""
        self._num_failures[peer_id] += 1

    def has_failed_for_good(self, peer_id: PeerId) -> bool:
        """Whether so many attempts have failed because of a peer that the others no longer wait for it."""
        return self._num_failures[peer_id] >= MOST_FAILURES

    def begin_round(self, members: Collection[str]) -> None:
        """Begin a round from which no peer is left out. The members of the last round have their failures forgotten."""
        for peer_id in self._num_failures.keys() & set(members):
            del self._num_failures[peer_id]
        self._excluded.clear()

    def forget_others(self, known: Collection[PeerId]) -> None:
        """Forget what was noted about peers that are not in `known`."""
        for by_peer in (self._suspected, self._num_failures):
            for peer_id in by_peer.keys() - known:
                del by_peer[peer_id]
