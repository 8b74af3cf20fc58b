"""A DHT in one process, for tests. Several directories can share it."""

from collections.abc import Sequence

from swarm.dht.known_records import Found
from swarm.machine.clock import Clock


class MemoryStore:
    """A RecordStore. Of two records with the same key and subkey it keeps the one that expires later, as the DHT does.

    Attributes:
        records: the records under each key.
    """

    def __init__(self, clock: Clock) -> None:
        self.records: dict[str, Found] = {}
        self._clock = clock

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
        values = self.records.setdefault(key, {})
        if expiration <= max(values.get(subkey, (b"", 0.0))[1], self._clock.time()):
            return False
        values[subkey] = (value, expiration)
        return True

    async def get(self, key: str, *, partly: bool = False) -> Found:
        now = self._clock.time()
        return {subkey: found for subkey, found in self.records.get(key, {}).items() if found[1] > now}

    def remember(self, addresses: Sequence[str]) -> None:
        pass
