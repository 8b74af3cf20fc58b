"""What each sender knows of the peers that the directory lists: the real choice of swarm.dht over simulated records."""

import asyncio
import bisect
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from scripts.benches.simulate.timeline import Timeline
from swarm.dht.keys import MOST_BITS, bits_of
from swarm.dht.known_records import KnownRecords
from swarm.dht.split_key import GO_DOWN, KEPT, SplitKey
from swarm.types import PeerRecord


class Listing:
    """The peers of one stage that are listed now, as they are under its keys once all have announced themselves."""

    def __init__(self) -> None:
        self.update([])

    def update(self, records: Sequence[PeerRecord]) -> None:
        self.records = sorted(records, key=lambda record: record.peer_id)
        self._bits = [bits_of(record.peer_id) for record in self.records]

    def under(self, bits: str) -> list[PeerRecord]:
        first = bisect.bisect_left(self._bits, bits)
        last = bisect.bisect_right(self._bits, bits + "1" * (MOST_BITS - len(bits)))
        is_split = last - first > GO_DOWN and len(bits) < MOST_BITS
        return self.records[first : min(last, first + KEPT) if is_split else last]


class ListedKey:
    """Takes the place of KnownRecords: nothing has to be fetched or checked."""

    def __init__(self, listing: Listing, key: str) -> None:
        self.bits = key.partition("/")[2]
        self.num_read = 0
        self._listing = listing

    async def read(self, *, partly: bool = False) -> list[PeerRecord]:
        found = self.present()
        self.num_read += len(found)
        return found

    def present(self) -> list[PeerRecord]:
        return self._listing.under(self.bits)


class Directory:
    """The listings of all stages, and what each sender has read of them."""

    def __init__(self, timeline: Timeline, num_stages: int) -> None:
        self._timeline = timeline
        self._listings = [Listing() for _ in range(num_stages)]
        self._splits: dict[tuple[str, int], SplitKey] = {}

    def update(self, stage: int, records: Sequence[PeerRecord]) -> None:
        self._listings[stage].update(records)

    def all(self, stage: int) -> list[PeerRecord]:
        return self._listings[stage].records

    def read(self, readers: Sequence[tuple[str, int, int]]) -> list[list[PeerRecord]]:
        """The peers of a stage that a sender knows, for each of these senders' names, stages, and microbatches under
        way."""

        async def read() -> list[list[PeerRecord]]:
            return [
                await self._split(name, stage).sample(is_own=False, under_way=under_way)
                for name, stage, under_way in readers
            ]

        return asyncio.run(read())

    def _split(self, name: str, stage: int) -> SplitKey:
        if (name, stage) not in self._splits:
            listing, own_id = self._listings[stage], hashlib.sha1(name.encode()).hexdigest()
            known = cast(Callable[[str], KnownRecords[PeerRecord]], partial(ListedKey, listing))
            self._splits[name, stage] = SplitKey(known, f"stage.{stage}", own_id, self._timeline)
        return self._splits[name, stage]
