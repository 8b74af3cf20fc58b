"""The records under one key of the DHT, as far as one process has read them, and how many may be one owner's.

Every record is verified before it counts. It stays until it expires, even if a later reading misses it. If there is no
room, new records are refused. All peer ids that use one token count as one owner, because the token's bearer can make
any number of ids. In an open run owners cannot be distinguished, and only the limits of the key apply.
"""

import logging
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm.credentials.authority import Authority
from swarm.credentials.certificates import bearer_of, peer_id_of
from swarm.dht.record_store import RecordStore
from swarm.dht.records import open_record, signed_by
from swarm.errors import IntegrityError, MalformedMessage, NotAllowed
from swarm.machine.clock import Clock, SteadyTime
from swarm.rpc.callers import Caller, Quota
from swarm.types import ClaimRecord, PeerRecord, RunRecord, TrainerRecord

logger = logging.getLogger(__name__)

MAX_KEY_RECORDS, MAX_KEY_BYTES = 1024, 3 << 20
"""Limits for one key. A node answers with all its records of a key in one message, which may have 4 MiB."""
MAX_OWNER_RECORDS, MAX_OWNER_BYTES = 256, 1 << 20
"""Limits for one owner's records under one key."""


@dataclass(frozen=True)
class _Kept:
    owner: Caller
    num_bytes: int
    expiration: float


class KeyQuota:
    """Counts the records of one key."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._records = Quota("records", MAX_KEY_RECORDS, each=MAX_OWNER_RECORDS)
        self._bytes = Quota("bytes of records", MAX_KEY_BYTES, each=MAX_OWNER_BYTES)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """The size of all counted records. Expired ones count until they are dropped."""
        return int(self._bytes.total)

    def take(self, subkey: str, owner: str | None, num_bytes: int, expiration: float, now: float) -> bool:
        """Count a record, in place of the same subkey's former record, if there is one.

        Args:
            owner: the owner whose limits apply in addition to the key's; None if there is none.
            expiration, now: seconds since the epoch.

        Returns:
            False if there is no room for the record. Then the former one stays.
        """
        former, whose = self._kept.get(subkey), Caller(subkey if owner is None else owner)
        self.drop(subkey)
        if not self._fits(whose, num_bytes):
            self.drop_expired(now)
        fits = self._fits(whose, num_bytes)
        if (kept := _Kept(whose, num_bytes, expiration) if fits else former) is not None:
            self._kept[subkey] = kept
            self._records.take(kept.owner)
            self._bytes.take(kept.owner, kept.num_bytes)
        return fits

    def drop(self, subkey: str) -> None:
        if (kept := self._kept.pop(subkey, None)) is not None:
            self._records.give_back(kept.owner)
            self._bytes.give_back(kept.owner, kept.num_bytes)

    def _fits(self, owner: Caller, num_bytes: int) -> bool:
        return self._records.fits(owner) and self._bytes.fits(owner, num_bytes)

    def drop_expired(self, now: float) -> None:
        for subkey in [subkey for subkey, kept in self._kept.items() if kept.expiration <= now]:
            self.drop(subkey)


Record = TypeVar("Record", PeerRecord, TrainerRecord, ClaimRecord, RunRecord)


class KnownRecords(Generic[Record]):
    """The records known under one key.

    When a machine's clock is set forward, all records seem to expire at once, and no peer would be left. So nothing
    expires here while the clock is in doubt (SteadyTime in machine/clock).
    """

    def __init__(
        self, store: RecordStore, key: str, model: type[Record], authority: Authority | None, clock: Clock
    ) -> None:
        """
        Args:
            model: the type of the payload in the key's records.
            authority: the owner of a locked run, in which only members' records count; None in an open run.
        """
        self.key = key
        self._store = store
        self._model: type[Record] = model
        self._authority = authority
        self._clock = clock
        self._steady_time = SteadyTime(clock)
        self._known: dict[str, tuple[Record, float]] = {}
        """The records by subkey, each with the time at which it expires."""
        self._quota = KeyQuota()
        """Bounds the number of records, because a node of the DHT may answer with any number of made-up ones."""

    def __len__(self) -> int:
        return len(self._known)

    async def read(self, *, partly: bool = False) -> list[Record]:
        """Read the key again.

        Returns:
            All records that are valid now, of any protocol version.

        Raises:
            PeerUnavailable: the DHT cannot be reached.
        """
        found = await self._store.get(self.key, partly=partly)
        now = self._clock.time()
        for subkey, (value, expiration) in found.items():
            if subkey in self._known and expiration <= self._known[subkey][1]:
                continue
            try:
                record = open_record(self._model, self.key, subkey, value, expiration, now, self._authority)
                _require_own(record, subkey)
                if not isinstance(record, RunRecord) and record.announced_at > expiration:
                    raise MalformedMessage(f"{subkey} says that it announced itself later than the record is valid")
            except (IntegrityError, MalformedMessage, NotAllowed) as error:
                logger.debug("left out: %s", error)
                continue
            owner = bearer_of(signed_by(value)) if self._authority is not None else None
            if self._quota.take(subkey, owner, len(value), expiration, now):
                self._known[subkey] = (record, expiration)
        steady_now = self._steady_time.now()
        if not self._steady_time.is_in_doubt:
            self._known = {subkey: known for subkey, known in self._known.items() if known[1] > steady_now}
        return [record for record, _ in self._known.values()]


def _require_own(record: PeerRecord | TrainerRecord | ClaimRecord | RunRecord, subkey: str) -> None:
    if record.peer_id != subkey:
        raise IntegrityError(f"{subkey} announces {record.peer_id}")
    if isinstance(record, PeerRecord) and record.certificate_pem and peer_id_of(record.certificate_pem) != subkey:
        raise IntegrityError(f"{subkey} announces another peer's certificate")
