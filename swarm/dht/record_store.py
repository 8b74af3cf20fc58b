"""Where announcements are stored and found again: what directory, discovery and lookup need of the DHT.

DhtNode is one, PeerStore reads one through a peer, and the tests have one in memory.
"""

from collections.abc import Sequence
from typing import Protocol

from swarm.errors import PeerUnavailable

Found = dict[str, tuple[bytes, float]]
"""What is under a key: subkey -> (sealed record, expiration in seconds since the epoch)."""


class NoOtherNode(PeerUnavailable):
    """The DHT is down to this machine's own node.

    Attributes:
        found: what that node stores itself.
    """

    def __init__(self, found: Found) -> None:
        super().__init__("no other node of the DHT answers")
        self.found = found


class RecordStore(Protocol):
    """Keeps sealed records; of two under one subkey it keeps the one that expires later."""

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
        """Store a sealed record until `expiration`, in seconds since the epoch.

        Returns:
            False if it was refused: badly signed, or not later than another one for this subkey.

        Raises:
            PeerUnavailable: no node or peer answers.
        """
        ...

    async def get(self, key: str, *, partly: bool = False) -> Found:
        """All unexpired records under a key.

        Args:
            partly: a cheap answer will do, even if a record is missing from it.

        Raises:
            PeerUnavailable: no node or peer answers.
            NoOtherNode: there were other nodes not long ago.
        """
        ...

    def remember(self, addresses: Sequence[str]) -> None:
        """Note the addresses of another node, for when the known ones are gone."""
        ...
