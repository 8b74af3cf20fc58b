"""How many records of one key are kept, and how many of these of one owner.

Used by validator for what a node stores, and by known_records for what is read. A record that expires makes room; until
then it stays, since it may be refreshed, and later ones are refused. The bearer of a token, who can make up any number
of peer ids, is one owner. In an open run one owner cannot be told from another, and only the key's own limits hold.
"""

from dataclasses import dataclass

MAX_KEY_RECORDS, MAX_KEY_BYTES = 1024, 3 << 20
"""Limits for one key. A node answers with all that it has under a key in one message, which may have 4 MiB."""
MAX_OWNER_RECORDS, MAX_OWNER_BYTES = 256, 1 << 20
"""Limits for the records of one owner among these."""


@dataclass(frozen=True)
class _Kept:
    owner: str | None
    num_bytes: int
    expiration: float


class KeyQuota:
    """The records of one key."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self.num_bytes = 0
        """Size of the records that were taken and have not been seen to expire."""

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, subkey: str, owner: str | None, num_bytes: int, expiration: float, now: float) -> bool:
        """Count a record, in the place of the one that the same subkey has.

        Args:
            owner: the one out of whose share it comes; None if it comes out of none.
            expiration, now: seconds since the epoch.

        Returns:
            False, and nothing has changed, if there is no room for it.
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
