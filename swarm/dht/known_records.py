"""The records under the keys of the DHT: which of them a node stores, and which a process believes that has read them.

Every record is verified before it counts. It stays until it expires, even if a later reading misses it. If there is no
room, new records are refused. All peer ids that use one token count as one owner, because the token's bearer can make
any number of ids. In an open run owners cannot be distinguished, and only the limits of the key apply.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from swarm.credentials.authority import Authority, bearer_of
from swarm.credentials.certificates import peer_id_of
from swarm.dht import keys
from swarm.dht.records import Envelope, open_record, verify
from swarm.errors import IntegrityError, MalformedMessage, NotAllowed, PeerUnavailable
from swarm.machine.clock import Clock, SteadyTime
from swarm.rpc.callers import Caller, Quota
from swarm.types import AmendmentsRecord, ClaimRecord, PeerRecord, RunRecord, TrainerRecord

logger = logging.getLogger(__name__)

MAX_KEY_RECORDS, MAX_KEY_BYTES = 1024, 3 << 20
"""Limits for one key. A node answers with all its records of a key in one message, which may have 4 MiB."""
MAX_OWNER_RECORDS, MAX_OWNER_BYTES = 256, 1 << 20
"""Limits for one owner's records under one key."""
MAX_STORED_BYTES = 64 << 20
"""Size of all records that a node stores."""

Found = dict[str, tuple[bytes, float]]
"""The records under a key: subkey -> (sealed record, expiration in seconds since the epoch)."""


class NoOtherNode(PeerUnavailable):
    """This process's own node is the only one of the DHT that answers; it has `found` the records that it stores
    itself."""

    def __init__(self, found: Found) -> None:
        super().__init__("no other node of the DHT answers")
        self.found = found


class RecordStore(Protocol):
    """A store of announcements: a DhtNode, or a PeerStore, which reads the DHT through a peer.

    It keeps sealed records. Of two records under one subkey it keeps the one that expires later.
    """

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
        """Store a sealed record until `expiration`, in seconds since the epoch; False if it was refused, because its
        signature is wrong or another record of this subkey expires no earlier. Raises PeerUnavailable."""

    async def get(self, key: str, *, partly: bool = False) -> Found:
        """All unexpired records under a key. With `partly` a cheap answer is enough, even if it lacks a record.

        Raises PeerUnavailable if no node or peer answers, and NoOtherNode if only this process's own node answers now,
        though others did a short time ago.
        """

    def remember(self, addresses: Sequence[str]) -> None:
        """Remember the addresses of another node, to be tried when the known ones are gone."""


@dataclass(frozen=True)
class _Kept:
    owner: Caller
    num_bytes: int
    expiration: float


class KeyQuota:
    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._records = Quota("records", MAX_KEY_RECORDS, each=MAX_OWNER_RECORDS)
        self._bytes = Quota("bytes of records", MAX_KEY_BYTES, each=MAX_OWNER_BYTES)

    @property
    def num_bytes(self) -> int:
        """The size of all counted records. Expired ones count until they are dropped."""
        return int(self._bytes.total)

    def take(self, subkey: str, owner: str | None, num_bytes: int, expiration: float, now: float) -> bool:
        """Count a record, in place of the same subkey's former record, if there is one; False, and no change, if there
        is no room.

        The limits of its `owner`, if it is not None, apply in addition to the key's. Times are seconds since the epoch.
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


Record = TypeVar("Record", PeerRecord, TrainerRecord, ClaimRecord, AmendmentsRecord, RunRecord)


class KnownRecords(Generic[Record]):
    """The records known under one key.

    When a machine's clock is set forward, all records seem to expire at once, and no peer would be left. So nothing
    expires here while the clock is in doubt (SteadyTime in machine/clock).
    """

    def __init__(
        self, store: RecordStore, key: str, model: type[Record], authority: Authority | None, clock: Clock
    ) -> None:
        """`model` is the type of the payload in the key's records; with an `authority` only members' records count."""
        self.key = key
        self._store = store
        self._model: type[Record] = model
        self._authority = authority
        self._clock = clock
        self._steady_time = SteadyTime(clock)
        self._known: dict[str, tuple[Record, float, str]] = {}
        """The records by subkey, each with the time at which it expires, and in a locked run its signer's
        certificates."""
        self._quota = KeyQuota()
        """Bounds the number of records, because a node of the DHT may answer with any number of made-up ones."""

    async def read(self, *, partly: bool = False) -> list[Record]:
        """Read the key again. Returns all records that are valid now, of any protocol. Raises
        PeerUnavailable."""
        found = await self._store.get(self.key, partly=partly)
        now = self._clock.time()
        for subkey, (value, expiration) in found.items():
            if subkey in self._known and expiration <= self._known[subkey][1]:
                continue
            try:
                record, signer = open_record(self._model, self.key, subkey, value, expiration, now, self._authority)
                _require_own(record, subkey)
                if not keys.takes(self.key, subkey):
                    raise IntegrityError(f"{subkey} announces itself under {self.key}, which is for other ids")
                if not isinstance(record, RunRecord) and record.announced_at > expiration:
                    raise MalformedMessage(f"{subkey} says that it announced itself later than the record is valid")
            except (IntegrityError, MalformedMessage, NotAllowed) as error:
                logger.debug("left out: %s", error)
                continue
            signer = "" if self._authority is None else signer
            owner = bearer_of(signer) if signer else None
            if self._quota.take(subkey, owner, len(value), expiration, now):
                self._known[subkey] = (record, expiration, signer)
        return self.present()

    def present(self) -> list[Record]:
        """What was read and is valid now."""
        return [record for record, _ in self.signed()]

    def signed(self) -> list[tuple[Record, str]]:
        """As `present`, each with its signer's certificates, which are empty in an open run."""
        steady_now, authority = self._steady_time.now(), self._authority
        if not self._steady_time.is_in_doubt:
            self._known = {subkey: known for subkey, known in self._known.items() if known[1] > steady_now}
        known = [(record, signer) for record, _, signer in self._known.values()]
        return known if authority is None else [each for each in known if not authority.has_revoked(each[1])]


def _require_own(record: PeerRecord | TrainerRecord | ClaimRecord | AmendmentsRecord | RunRecord, subkey: str) -> None:
    if record.peer_id != subkey:
        raise IntegrityError(f"{subkey} announces {record.peer_id}")
    if isinstance(record, PeerRecord) and record.certificate_pem and peer_id_of(record.certificate_pem) != subkey:
        raise IntegrityError(f"{subkey} announces another peer's certificate")


class RecordValidator:
    """Accepts only sealed records of one run that are under the key and the owner's subkey for which they were signed.

    Until `belong_to` is called, it accepts only announcements of runs, so that a joiner can find its run.
    """

    def __init__(self, clock: Clock, *, hash_key: Callable[[str], bytes], pack: Callable[[object], bytes]) -> None:
        """`hash_key` is hivemind's hash, because hivemind passes only hashes of keys to a validator, and `pack` its
        msgpack, in which it passes subkeys and values."""
        self._clock = clock
        self._hash_key = hash_key
        self._pack = pack
        self._authority: Authority | None = None
        self._keys: frozenset[str] | None = frozenset({keys.RUNS})
        self._quotas: dict[bytes, KeyQuota] = {}
        """The quota of each key with stored records, by hivemind's hash of the key."""

    def belong_to(self, run_keys: Collection[str] | None, authority: Authority | None) -> None:
        """From now on accept only records under these keys and their parts, or those of all runs if they are None; with
        an `authority` only its members' records."""
        self._keys = None if run_keys is None else frozenset(run_keys)
        self._authority = authority

    def validate(self, record: Any) -> bool:
        return self._opened(record) is not None

    def has_room(self, record: Any) -> bool:
        """Whether hivemind may store a DHTRecord, because it is valid and fits. If so, the record is counted."""
        envelope = self._opened(record)
        if envelope is None:
            return False
        key, subkey = bytes(record.key), record.subkey[2:].decode()
        owner = bearer_of(envelope.certificate_pem) if self._authority is not None else None
        now, num_bytes = self._clock.time(), len(record.value)
        if self._num_bytes + num_bytes > MAX_STORED_BYTES:
            for quota in self._quotas.values():
                quota.drop_expired(now)
            if self._num_bytes + num_bytes > MAX_STORED_BYTES:
                return False
        return self._quotas.setdefault(key, KeyQuota()).take(subkey, owner, num_bytes, record.expiration_time, now)

    @property
    def _num_bytes(self) -> int:
        return sum(quota.num_bytes for quota in self._quotas.values())

    def forget(self, key: bytes) -> None:
        self._quotas.pop(key, None)

    def _opened(self, record: Any) -> Envelope | None:
        # msgpack puts two bytes before our subkeys and three before our values; the comparison refuses anything else.
        subkey = record.subkey[2:].decode(errors="replace")
        value = record.value[3:]
        if self._pack(subkey) != record.subkey or self._pack(value) != record.value:
            return None
        try:
            envelope = verify(subkey, value, record.expiration_time, self._clock.time(), self._authority)
        except (IntegrityError, MalformedMessage, NotAllowed) as error:
            logger.debug("refused for the DHT: %s", error)
            return None
        is_ours = keys.is_of_a_run(envelope.key) if self._keys is None else keys.whole_of(envelope.key) in self._keys
        fits = is_ours and keys.takes(envelope.key, subkey)
        return envelope if fits and self._hash_key(envelope.key) == bytes(record.key) else None

    def sign_value(self, record: Any) -> bytes:
        """The value itself, because it is sealed already."""
        return bytes(record.value)

    def strip_value(self, record: Any) -> bytes:
        """The value itself, because readers need the seal."""
        return bytes(record.value)
