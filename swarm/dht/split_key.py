"""The records of one stage's peers: under one key while these are few, and under a tree of keys when they are many.

The first key takes all peers. Below a key with many peers are two, for the ids that go on with a bit 0 and those that
go on with 1. A peer announces itself from the first key downwards, each time under the key of its own id, until one
lists few others. It leaves out keys that list enough others with lower ids. So the lowest key on every way lists all
peers of its bits, and the keys above it list those with the lowest ids, who may lead.

Nobody announces how many keys there are: each process goes down where a key lists SPLIT peers, whose ids have the key's
bits. So made-up peers let as many keys be split as others would, and only on the ways to their own ids.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from swarm.dht.keys import MOST_BITS, bits_of, part_of
from swarm.dht.known_records import KnownRecords
from swarm.errors import PeerUnavailable
from swarm.machine.clock import Clock
from swarm.types import PeerRecord

logger = logging.getLogger(__name__)

GO_DOWN, SPLIT = 24, 32
"""With so many other peers under a key, a peer announces itself below it as well, and with SPLIT peers readers look
there. The first number is lower, so that readers go where announcements are already."""
KEPT = 48
"""So many peers stay under a key that was split. More than SPLIT, so that some of them may die at the same time."""
FEW = 8
"""Where the lowest key lists fewer peers, its readers take those of the key above it too."""
LEAST_POINTS, MOST_POINTS = 4, 1024
"""At how many places among all ids a sender looks: one in each quarter, or more if it has much to send. One is its own
id, and the others follow from it."""
WORK_PER_POINT = 16
"""For so many microbatches that are under way at a time, a sender looks at one place more. It finds more peers there,
so that it knows one or two for each."""
UPPER_SECONDS = 90.0
"""How long a split key counts as it was last read."""
FIRST_SECONDS = 10.0
"""The same for a peer of the stage and the first key, with those that may lead. All peers of the stage read it."""
SOON_SECONDS = 10.0
"""The same, where the lowest key lists few peers: then many have gone, and others have to take their places above."""
NUM_HEIRS = 2
"""So many peers of the lowest ids, of which one leads the stage, know all others."""
READS_AT_ONCE = 16
MOST_KEYS = 2048
"""The most keys of a stage that are read to know all of its peers."""


@dataclass(eq=False)
class _Key:
    known: KnownRecords[PeerRecord]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    read_at: float = float("-inf")
    turn: int = -1
    """The number of the sample for which it was last read."""
    ids: frozenset[str] = frozenset()
    """The peers that it listed when it was last read."""


class SplitKey:
    def __init__(self, known: Callable[[str], KnownRecords[PeerRecord]], key: str, own_id: str, clock: Clock) -> None:
        self._make = known
        self._key = key
        self._own_id = own_id
        self._clock = clock
        self._keys: dict[str, _Key] = {}
        self._depths: dict[str, int] = {}
        """How many bits the lowest key had on the way to each point."""
        self._points: list[str] = []
        self._lowest = ""
        """The bits of the lowest key under which this process announced itself."""
        self._turn = 0
        self.num_known = 0
        """How many peers the last sample had."""

    async def places(self) -> list[str]:
        bits, places = bits_of(self._own_id), list[str]()
        seconds = SOON_SECONDS if self._lowest and len(self._at(self._lowest).ids) < FEW else UPPER_SECONDS
        for depth in range(MOST_BITS + 1):
            key = self._at(bits[:depth])
            try:
                await self._seen(bits[:depth], seconds=seconds)
            except PeerUnavailable as error:
                logger.debug("where to announce this peer follows from what was read before: %s", error)
                key.read_at = self._clock.monotonic()
            others = key.ids - {self._own_id}
            is_lowest = len(others) < GO_DOWN
            if is_lowest or sum(other < self._own_id for other in others) < KEPT:
                places.append(part_of(self._key, bits[:depth]))
            if is_lowest:
                break
        self._lowest = bits[:depth]
        return places

    async def everyone(self, *, partly: bool = False) -> list[PeerRecord]:
        """All peers of the stage. Raises PeerUnavailable."""
        self._turn += 1
        found, level, num_keys = dict[str, PeerRecord](), [""], 0
        while level and num_keys < MOST_KEYS:
            below = []
            for first in range(0, len(level), READS_AT_ONCE):
                some = level[first : first + READS_AT_ONCE]
                for bits, records in zip(
                    some, await asyncio.gather(*(self._read(bits, partly) for bits in some)), strict=True
                ):
                    _add(found, records)
                    if self._is_split(bits):
                        below += [bits + "0", bits + "1"]
            num_keys += len(level)
            level = below
        return list(found.values())

    async def sample(
        self, *, is_own: bool, leads: bool = False, partly: bool = False, under_way: int = 0
    ) -> list[PeerRecord]:
        """All peers of a small stage, and of a large one some that stay the same. Raises PeerUnavailable.

        Of this process's own stage (`is_own`) these are its neighbours by id and those that may lead; and everybody, if
        it `leads` or has one of the lowest ids. Of other stages these are a few dozen, and more, from then on, for a
        sender that has many microbatches `under_way`.
        """
        self._turn += 1
        seconds = 0.0 if not self._is_split("") else FIRST_SECONDS if is_own else UPPER_SECONDS
        found = _add({}, (await self._seen("", partly, seconds=seconds)).known.present())
        if self._is_split(""):
            is_heir = self._own_id in sorted(found.keys() | {self._own_id})[:NUM_HEIRS]
            if is_own and (leads or is_heir):
                everyone = await self.everyone(partly=partly)
                self.num_known = len(everyone)
                return everyone
            points = [bits_of(self._own_id)] if is_own else self._points_for(under_way)
            found = found if is_own else {}
            for first in range(0, len(points), READS_AT_ONCE):
                some = points[first : first + READS_AT_ONCE]
                for way in await asyncio.gather(*(self._way_down(point, partly) for point in some)):
                    _add(found, way.values())
        self._forget()
        self.num_known = len(found)
        return list(found.values())

    def _points_for(self, under_way: int) -> list[str]:
        wanted = min(MOST_POINTS, max(LEAST_POINTS, under_way // WORK_PER_POINT))
        self._points += [_point(self._own_id, self._key, number) for number in range(len(self._points), wanted)]
        return self._points

    async def _way_down(self, point: str, partly: bool) -> dict[str, PeerRecord]:
        depth = self._depths.get(point, 0)
        while depth and len((await self._seen(point[: depth - 1], partly)).ids) < SPLIT:
            depth -= 1
        found = _add({}, await self._read(point[:depth], partly))
        while self._is_split(point[:depth]):
            depth += 1
            found = _add({}, await self._read(point[:depth], partly))
        self._depths[point] = depth
        while len(found) < FEW and depth:
            depth -= 1
            _add(found, await self._read(point[:depth], partly))
        return found

    def _is_split(self, bits: str) -> bool:
        return len(bits) < MOST_BITS and len(self._at(bits).ids) >= SPLIT

    # -- one key -----------------------------------------------------------------------------------------------------

    async def _read(self, bits: str, partly: bool) -> list[PeerRecord]:
        key, turn = self._at(bits), self._turn
        async with key.lock:
            if key.turn == turn:
                return key.known.present()
            records = await key.known.read(partly=partly)
            key.read_at, key.turn, key.ids = self._clock.monotonic(), turn, frozenset(r.peer_id for r in records)
            return records

    async def _seen(self, bits: str, partly: bool = True, *, seconds: float = UPPER_SECONDS) -> _Key:
        """A key as it was read within so many seconds."""
        key = self._at(bits)
        if self._clock.monotonic() - key.read_at >= seconds:
            key.turn = -1
            await self._read(bits, partly)
        return key

    def _at(self, bits: str) -> _Key:
        if bits not in self._keys:
            self._keys[bits] = _Key(self._make(part_of(self._key, bits)))
        return self._keys[bits]

    def _forget(self) -> None:
        oldest = self._clock.monotonic() - 2 * UPPER_SECONDS
        self._keys = {bits: key for bits, key in self._keys.items() if key.read_at >= oldest or key.lock.locked()}


def _point(own_id: str, key: str, number: int) -> str:
    """A place for each number, in the quarters of all ids by turns. The first one in the quarter of a reader's own id
    is that id, so that the reader sees who else has it."""
    own, quarter = bits_of(own_id), f"{number % 4:02b}"
    if number < 4 and own.startswith(quarter):
        return own
    return quarter + bits_of(hashlib.sha256(f"{own_id} {key} {number}".encode()).hexdigest())[2:]


def _add(found: dict[str, PeerRecord], records: Iterable[PeerRecord]) -> dict[str, PeerRecord]:
    """Add records; of a peer that is listed under several keys the newest counts."""
    for record in records:
        former = found.get(record.peer_id)
        if former is None or former.announced_at <= record.announced_at:
            found[record.peer_id] = record
    return found
