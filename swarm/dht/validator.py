"""What a DHT node stores, and what it believes when other nodes answer.

Used by node, which hands it to hivemind in the place of a RecordValidatorBase. Never asks the network anything.
"""

import logging
from collections.abc import Callable
from typing import Any

from swarm.authority import Authority
from swarm.clock import Clock
from swarm.dht.records import verify
from swarm.errors import IntegrityError, MalformedMessage, NotAllowed

logger = logging.getLogger(__name__)


class RecordValidator:
    """Accepts sealed records, stored by their owner under the key they were signed for, and nothing else."""

    def __init__(self, clock: Clock, *, hash_key: Callable[[str], bytes], pack: Callable[[object], bytes]) -> None:
        """`hash_key` and `pack` are hivemind's: of a key hivemind shows the hash only, of subkey and value msgpack."""
        self._clock = clock
        self._hash_key = hash_key
        self._pack = pack
        self.authority: Authority | None = None
        """The owner of a locked run: only its members' records are accepted."""

    def validate(self, record: Any) -> bool:
        """Whether hivemind may keep a DHTRecord."""
        # Behind msgpack's prefixes for sizes like ours; whatever is packed otherwise fails the comparison.
        subkey = record.subkey[2:].decode(errors="replace")
        value = record.value[3:]
        if self._pack(subkey) != record.subkey or self._pack(value) != record.value:
            return False
        try:
            envelope = verify(subkey, value, record.expiration_time, self._clock.time(), self.authority)
        except (IntegrityError, MalformedMessage, NotAllowed) as error:
            logger.debug("refused for the DHT: %s", error)
            return False
        return self._hash_key(envelope.key) == bytes(record.key)

    def sign_value(self, record: Any) -> bytes:
        """The value itself: it comes here sealed."""
        return bytes(record.value)

    def strip_value(self, record: Any) -> bytes:
        """The value itself: readers want the seal."""
        return bytes(record.value)
