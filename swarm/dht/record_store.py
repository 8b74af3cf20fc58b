"""The interface of the DHT that directory, discovery and lookup use: a store of announcements.

A DhtNode is such a store, a PeerStore reads the DHT through a peer, and the tests have a store in memory.
"""

from collections.abc import Sequence
from typing import Protocol

from swarm.errors import PeerUnavailable

Found = dict[str, tuple[bytes, float]]
"""The records under a key: subkey -> (sealed record, expiration in seconds since the epoch)."""


class NoOtherNode(PeerUnavailable):
    """This process's own node is the only one of the DHT that answers.

    Attributes:
        found: the records that this node stores itself.
    """

    def __init__(self, found: Found) -> None:
        super().__init__("no other node of the DHT answers")
        self.found = found


class RecordStore(Protocol):
    """Keeps sealed records. Of two records under one subkey it keeps the one that expires later."""

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
        """Store a sealed record until `expiration`, in seconds since the epoch.

        Returns:
            False if the record was refused: its signature is wrong, or another record of this subkey expires no
            earlier.

        Raises:
            PeerUnavailable: no node or peer answers.
        """
        ...

    async def get(self, key: str, *, partly: bool = False) -> Found:
        """All unexpired records under a key.

        Args:
            partly: whether a cheap answer is enough, even if it lacks a record.

        Raises:
            PeerUnavailable: no node or peer answers.
            NoOtherNode: only this process's own node answers now, though others did a short time ago.
        """
        ...

    def remember(self, addresses: Sequence[str]) -> None:
        """Remember the addresses of another node, to be tried when the known ones are gone."""
        ...
