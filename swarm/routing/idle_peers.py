"""The peers of one stage that had nothing to do when they last answered, for its queue (swarm.routing.peer_queue).

Shares say how much a peer should get, not when: each of many senders knows its own part of the traffic only, and by
chance some peers have a queue while others have nothing. A reply that leaves its peer without work tells one sender so,
at the only moment at which it is certain (join-idle-queue, Lu et al. 2011). Decides nothing about shares.
"""

from collections.abc import Collection

from swarm.types import PeerId


class IdlePeers:
    """Who was idle, and for how long that is worth believing."""

    def __init__(self) -> None:
        self._until: dict[PeerId, float] = {}

    def heard(self, peer_id: PeerId, until: float) -> None:
        """A peer's reply said that nothing waits there."""
        self._until.pop(peer_id, None)
        self._until[peer_id] = until

    def forget(self, peer_id: PeerId) -> None:
        """It has something to do, or cannot be asked."""
        self._until.pop(peer_id, None)

    def pop(self, now: float, exclude: Collection[PeerId]) -> PeerId | None:
        """Take out whoever was heard last; those that were heard too long ago are dropped on the way.

        Args:
            exclude: those that one microbatch does not go to; they stay, for others.
        """
        excluded: list[tuple[PeerId, float]] = []
        try:
            while self._until:
                peer_id, until = self._until.popitem()
                if until < now:
                    continue
                if peer_id not in exclude:
                    return peer_id
                excluded.append((peer_id, until))
            return None
        finally:
            self._until.update(reversed(excluded))
