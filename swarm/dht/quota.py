"""How many records of one key are kept, and how many of these may be one owner's.

Used by validator for the records that a node stores, and by known_records for those that are read. If there is no room,
new records are refused. The kept ones stay until they expire, because they may be renewed. All peer ids that use one
token count as one owner, because the token's bearer can make any number of ids. In an open run owners cannot be
distinguished, and only the limits of the key apply.
"""

from dataclasses import dataclass

MAX_KEY_RECORDS, MAX_KEY_BYTES = 1024, 3 << 20
"""Limits for one key. A node answers with all its records of a key in one message, which may have 4 MiB."""
MAX_OWNER_RECORDS, MAX_OWNER_BYTES = 256, 1 << 20
"""Limits for one owner's records under one key."""


@dataclass(frozen=True)
class _Kept:
    owner: str | None
    num_bytes: int
    expiration: float


class KeyQuota:
    """Counts the records of one key."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self.num_bytes = 0
        """The size of all counted records. Expired ones count until they are dropped."""

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, subkey: str, owner: str | None, num_bytes: int, expiration: float, now: float) -> bool:
        """Count a record, in place of the same subkey's former record, if there is one.

        Args:
            owner: the owner whose limits apply in addition to the key's; None if there is none.
            expiration, now: seconds since the epoch.

        Returns:
            False if there is no room for the record. Then nothing has changed.
        """
        if not self._fits(subkey, owner, num_bytes):
            self.drop_expired(now)
            if not self._fits(subkey, owner, num_bytes):
                return False
        self.drop(subkey)
        self._kept[subkey] = _Kept(owner, num_bytes, expiration)
        self.num_bytes += num_bytes
        return True

    def drop(self, subkey: str) -> None:
        """Stop counting a record."""
        if (kept := self._kept.pop(subkey, None)) is not None:
            self.num_bytes -= kept.num_bytes

    def _fits(self, subkey: str, owner: str | None, num_bytes: int) -> bool:
        former = self._kept.get(subkey)
        num_records = len(self._kept) + (former is None)
        all_bytes = self.num_bytes + num_bytes - (former.num_bytes if former is not None else 0)
        if num_records > MAX_KEY_RECORDS or all_bytes > MAX_KEY_BYTES:
            return False
        if owner is None:
            return True
        others = [kept.num_bytes for name, kept in self._kept.items() if kept.owner == owner and name != subkey]
        return len(others) < MAX_OWNER_RECORDS and sum(others) + num_bytes <= MAX_OWNER_BYTES

    def drop_expired(self, now: float) -> None:
        """Stop counting the records that have expired."""
        for subkey in [subkey for subkey, kept in self._kept.items() if kept.expiration <= now]:
            self.drop(subkey)
