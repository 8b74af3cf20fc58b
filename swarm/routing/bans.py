"""Which peers of a stage are left alone since they failed, and until when. For its queue (swarm.routing.peer_queue).

A ban doubles with each failure in a row, and outlives what the queue knows of its peer: one that vanishes and comes
back with the old announcement is still banned. Every `now` is monotonic seconds. Pure.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from swarm.types import PeerId

BASE_BAN_SECONDS = 5.0
LONGEST_BAN_SECONDS = 300.0
LEAST_BAN_SHARE = 0.2
"""The share of a ban that remains where the peer answers again sooner: a few bytes may get through where a microbatch
does not."""


@dataclass(slots=True)
class _Ban:
    since: float
    until: float
    seconds: float
    """The back-off that `until` came from; the next one is twice as long."""
    announced_at: float
    """The time of the newest announcement that was taken into account."""
    is_gone: bool
    """Whether no process listened there, so that a peer that announces itself has come back."""
    is_unreachable: bool
    reason: str
    """The reason, for people."""


class Bans:
    """The bans of one stage's peers. Each method that changes one tells whether it did."""

    def __init__(self) -> None:
        self._bans: dict[PeerId, _Ban] = {}

    def until(self, peer_id: PeerId) -> float:
        """When a peer's ban ends, or ended."""
        ban = self._bans.get(peer_id)
        return -math.inf if ban is None else ban.until

    def reason(self, peer_id: PeerId) -> str:
        """Why a peer was banned last; empty if it was not."""
        ban = self._bans.get(peer_id)
        return "" if ban is None else ban.reason

    def unreachable(self, now: float) -> list[PeerId]:
        """Peers that are banned since they did not answer. O(bans)."""
        return [peer_id for peer_id, ban in self._bans.items() if ban.is_unreachable and ban.until > now]

    def failed(
        self, peer_id: PeerId, now: float, *, announced_at: float, is_gone: bool, is_unreachable: bool, reason: str
    ) -> bool:
        """Ban a peer, unless it is: calls that were in flight together fail together, and that is one failure."""
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
        """End a peer's ban, and its back-off."""
        ban = self._bans.pop(peer_id, None)
        return ban is not None and ban.until > now

    def announced(self, peer_id: PeerId, announced_at: float, now: float) -> bool:
        """A new announcement ends or shortens a ban, but not where the peer is out of reach: it may still be so."""
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
        """End the ban of a peer that is there again, once LEAST_BAN_SHARE of it has passed; the back-off goes on."""
        ban = self._bans.get(peer_id)
        if ban is None or not ban.is_unreachable or now - ban.since < LEAST_BAN_SHARE * ban.seconds:
            return False
        ban.until = min(ban.until, now)
        return True

    def unanswered(self, peer_id: PeerId, now: float, seconds: float) -> bool:
        """Keep a peer banned for so long at least, if it still is, for not having answered. The back-off goes on."""
        ban = self._bans.get(peer_id)
        if ban is None or not ban.is_unreachable or not now < ban.until < now + seconds:
            return False
        ban.until = now + seconds
        return True

    def forget(self, now: float, *, but: Collection[PeerId]) -> None:
        """Forget bans that are over, and their back-offs, of all other peers."""
        self._bans = {peer_id: ban for peer_id, ban in self._bans.items() if peer_id in but or ban.until > now}
