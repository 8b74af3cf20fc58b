"""Decides which records a DHT node stores and believes: those of its own run.

Never asks the network anything.
"""

import logging
from collections.abc import Callable, Collection
from typing import Any

from swarm.credentials.authority import Authority
from swarm.credentials.certificates import bearer_of
from swarm.dht import keys
from swarm.dht.known_records import KeyQuota
from swarm.dht.records import Envelope, verify
from swarm.errors import IntegrityError, MalformedMessage, NotAllowed
from swarm.machine.clock import Clock

logger = logging.getLogger(__name__)

MAX_STORED_BYTES = 64 << 20
"""Size of all records that a node stores."""


class RecordValidator:
    """Accepts only sealed records of one run that are under the key and the owner's subkey for which they were signed.

    Until `belong_to` is called, it accepts only announcements of runs, so that a joiner can find its run.
    """

    def __init__(self, clock: Clock, *, hash_key: Callable[[str], bytes], pack: Callable[[object], bytes]) -> None:
        """
        Args:
            hash_key: gives hivemind's hash of a key, because hivemind passes only the hash to a validator.
            pack: hivemind's msgpack, in which hivemind passes subkeys and values to a validator.
        """
        self._clock = clock
        self._hash_key = hash_key
        self._pack = pack
        self._authority: Authority | None = None
        self._keys: set[bytes] | None = {hash_key(keys.RUNS)}
        self._quotas: dict[bytes, KeyQuota] = {}
        """The quota of each key with stored records, by hivemind's hash of the key."""

    def belong_to(self, run_keys: Collection[str] | None, authority: Authority | None) -> None:
        """From now on accept only records under these keys.

        Args:
            run_keys: None for those of all runs.
            authority: the owner of a locked run, in which only members' records are accepted; None for an open run.
        """
        self._keys = None if run_keys is None else set(map(self._hash_key, run_keys))
        self._quotas = {key: quota for key, quota in self._quotas.items() if self._keys is None or key in self._keys}
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
        key = bytes(record.key)
        if self._keys is not None and key not in self._keys:
            return None
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
        if self._keys is None and not keys.is_of_a_run(envelope.key):
            return None
        return envelope if self._hash_key(envelope.key) == key else None

    def sign_value(self, record: Any) -> bytes:
        """The value itself, because it is sealed already."""
        return bytes(record.value)

    def strip_value(self, record: Any) -> bytes:
        """The value itself, because readers need the seal."""
        return bytes(record.value)
