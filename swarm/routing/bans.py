"""Which peers get no work for a while, and until when: those that failed, and those that compute wrongly.

Never reads a clock: every `now` is monotonic seconds.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarm.types import PeerId

BASE_BAN_SECONDS = 5.0
LONGEST_BAN_SECONDS = 300.0
LEAST_BAN_SHARE = 0.2
"""The share of a ban that a peer has to wait even if it answers again sooner: where the few bytes of an answer get
through, a microbatch may not."""
DISTRUST_SECONDS = 1800.0
"""How long a peer that computes wrongly gets no work."""


@dataclass(slots=True)
class _Ban:
    since: float
    until: float
    seconds: float
    """The length of this ban as it began; the next one in a row is twice as long."""
    announced_at: float
    """The time of the newest announcement that was taken into account."""
    is_gone: bool
    """Whether no process listened at the peer's address, so that a later announcement is a new process's."""
    is_unreachable: bool
    reason: str


class Bans:
    """The bans of one stage's peers. Each method that may change a ban returns whether it did.

    A ban doubles with each failure in a row. It stays when the queue forgets its peer, so that a peer which vanishes
    and comes back with its old announcement is still banned.
    """

    def __init__(self) -> None:
        self._bans: dict[PeerId, _Ban] = {}

    def until(self, peer_id: PeerId) -> float:
        """Minus infinity for a peer that was not banned."""
        ban = self._bans.get(peer_id)
        return -math.inf if ban is None else ban.until

    def reason(self, peer_id: PeerId) -> str:
        ban = self._bans.get(peer_id)
        return "" if ban is None else ban.reason

    def unreachable(self, now: float) -> list[PeerId]:
        return [peer_id for peer_id, ban in self._bans.items() if ban.is_unreachable and ban.until > now]

    def failed(
        self, peer_id: PeerId, now: float, *, announced_at: float, is_gone: bool, is_unreachable: bool, reason: str
    ) -> bool:
        """Ban a peer, unless it is banned already: calls that were in flight together fail together, as one failure."""
        if self.until(peer_id) > now:
            return False
        previous = self._bans.get(peer_id)
        seconds = BASE_BAN_SECONDS if previous is None else min(2 * previous.seconds, LONGEST_BAN_SECONDS)
        self._bans[peer_id] = _Ban(
            since=now, until=now + seconds, seconds=seconds, announced_at=announced_at, is_gone=is_gone,
            is_unreachable=is_unreachable, reason=reason,
        )  # fmt: skip
        return True

    def succeeded(self, peer_id: PeerId, now: float) -> bool:
        ban = self._bans.pop(peer_id, None)
        return ban is not None and ban.until > now

    def announced(self, peer_id: PeerId, announced_at: float, now: float) -> bool:
        """End or shorten a peer's ban because of a new announcement. If the peer did not answer, and its process was
        not gone, the ban stays, because the peer may still be out of reach."""
        ban = self._bans.get(peer_id)
        if ban is None or announced_at <= ban.announced_at:
            return False
        ban.announced_at = announced_at
        if ban.is_gone:
            ban.until = now
        elif not ban.is_unreachable:
            ban.until = min(ban.until, ban.since + BASE_BAN_SECONDS)
        return True

    def answered(self, peer_id: PeerId, now: float) -> bool:
        """End the ban of an unreachable peer that answers again, but not before LEAST_BAN_SHARE of it has passed.

        If the peer fails again before it succeeds, its next ban is twice as long all the same.
        """
        ban = self._bans.get(peer_id)
        if ban is None or not ban.is_unreachable or now - ban.since < LEAST_BAN_SHARE * ban.seconds:
            return False
        ban.until = min(ban.until, now)
        return True

    def unanswered(self, peer_id: PeerId, now: float, seconds: float) -> bool:
        """Prolong the ban of an unreachable peer to at least `seconds` from now, if it is still banned."""
        ban = self._bans.get(peer_id)
        if ban is None or not ban.is_unreachable or not now < ban.until < now + seconds:
            return False
        ban.until = now + seconds
        return True

    def forget(self, now: float, *, but: Collection[PeerId]) -> None:
        """Forget bans that are over, of peers that are not in `but`; their next bans are short again."""
        self._bans = {peer_id: ban for peer_id, ban in self._bans.items() if peer_id in but or ban.until > now}


class Distrusted:
    """The peers that compute wrongly, which get no work at any block for DISTRUST_SECONDS, whatever they answer."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, tuple[float, str]] = {}

    def add(self, peer_id: PeerId, now: float, reason: str) -> None:
        self._peers[peer_id] = now + DISTRUST_SECONDS, reason

    def current(self, now: float) -> Mapping[PeerId, tuple[float, str]]:
        """Until when each is distrusted, and why. Forgets those whose time is over."""
        self._peers = {peer: kept for peer, kept in self._peers.items() if kept[0] > now}
        return self._peers
