"""Which peers have said that they will take one more microbatch.

Used by the hop and by the simulator. On a credit tensors are sent along with the request; without one the sender first
waits to be accepted. A credit may prove wrong: then the peer answers Busy all the same. Pure.
"""

from swarm.types import PeerId


class Credits:
    """One sender's."""

    def __init__(self) -> None:
        self._left: dict[PeerId, int] = {}

    def granted(self, peer_id: PeerId, count: int) -> None:
        """A peer's reply carried so many; earlier ones are void."""
        self._left[peer_id] = count

    def left(self, peer_id: PeerId) -> int:
        """How many of a peer's there are."""
        return self._left.get(peer_id, 0)

    def take(self, peer_id: PeerId) -> bool:
        """Use one up, if there is one."""
        left = self._left.pop(peer_id, 0)
        if left > 1:
            self._left[peer_id] = left - 1
        return left > 0

    def drop(self, peer_id: PeerId) -> None:
        """Forget a peer that has failed."""
        self._left.pop(peer_id, None)
