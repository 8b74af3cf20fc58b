"""The directory of a run: which peers serve which block, which claim to be on their way, and which trainers there are.

Every record is signed and checked. The directory never calls the peers that it lists, and decides nothing about them.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from swarm.credentials.identity import Identity
from swarm.dht import keys
from swarm.dht.known_records import MAX_OWNER_RECORDS, KnownRecords, Record, RecordStore
from swarm.dht.records import MAX_LIFETIME_SECONDS, seal
from swarm.dht.split_key import SplitKey
from swarm.errors import IncompatibleVersion, PeerUnavailable
from swarm.machine.clock import Clock
from swarm.types import (
    PROTOCOLS,
    AmendmentsRecord,
    Block,
    ClaimRecord,
    PeerRecord,
    PeerState,
    Protocols,
    RunRecord,
    TrainerRecord,
    common_protocol,
)

logger = logging.getLogger(__name__)

Announced = PeerRecord | TrainerRecord | ClaimRecord | AmendmentsRecord | RunRecord

RENEW_SECONDS, NUM_RENEWALS = 5.0, 4
"""Time between two renewals of a record, and how many of them its lifetime has."""
LOOK_SECONDS = 0.5
LEAVING_SECONDS = 5.0
"""A peer that left is listed as leaving for at least this long."""
MOST_NAMED = 4
"""The most other releases, or peers of such, that one line names."""
NUM_OFTEN, MAX_STRETCH = 32, 3.0
"""Up to NUM_OFTEN peers are read at the requested interval. With more peers the interval grows in proportion, up to
MAX_STRETCH times."""


class Directory:
    """One process's view of the run's records, and its own announcements. In a locked run only members' records
    count."""

    def __init__(self, store: RecordStore, identity: Identity, run_id: str, clock: Clock) -> None:
        self.store = store
        """DirectoryService reads it directly, and passes records on unchanged."""
        self._identity = identity
        self._run_id = run_id
        self._clock = clock
        self._blocks: dict[Block, SplitKey] = {}
        self._trainers = self._known(keys.of_trainers(run_id), TrainerRecord)
        self._claims = self._known(keys.of_claims(run_id), ClaimRecord)
        self._amendments = self._known(keys.of_amendments(run_id), AmendmentsRecord)
        self._announced: dict[Block, PeerRecord] = {}
        self._led = frozenset[Block]()
        self._expirations: dict[str, float] = {}
        self.num_returns = 0
        """How often `watch` has seen the DHT answer again after an outage."""
        self._spoken: dict[str, Collection[Protocols]] = {}
        """What those speak that are listed under each key, this release's own range left out."""
        self._said: Collection[Protocols] = frozenset()
        self._listed: dict[Block, tuple[int, list[PeerRecord]]] = {}
        """By block, as last read: how many peers speak a protocol of this release, and those that do not."""

    async def announce(self, record: Announced, lifetime_seconds: float) -> None:
        """List this process: a peer under the record's block, and others under the key of their kind. Raises
        PeerUnavailable if the DHT cannot be reached, or refused the record."""
        stored, fault = False, None
        # A large block's lowest key comes first, because most peers are found there alone.
        for key in reversed(await self._keys_of(record)):
            try:
                stored = await self._announce_under(key, record, lifetime_seconds) or stored
            except PeerUnavailable as error:
                fault = error
                break
        if not stored:
            raise fault or PeerUnavailable(
                "no other node of the DHT took this peer's record. If that goes on: is this machine's clock right, "
                f"does its token hold, and do at most {MAX_OWNER_RECORDS} processes use that token?"
            )
        if isinstance(record, PeerRecord):
            self._announced[record.block] = record

    async def _announce_under(self, key: str, record: Announced, lifetime_seconds: float) -> bool:
        """Returns False if the record was refused. Raises PeerUnavailable."""
        now = self._clock.time()
        # Of two records the DHT keeps the one that expires later. So a new record must expire after the last one, which
        # may still be on its way.
        later = self._expirations.get(key, 0.0) + 0.001
        if later > now + MAX_LIFETIME_SECONDS:
            # The last record was announced while the clock was ahead. No node accepted it, and none would accept a
            # later expiration.
            later = 0.0
        expiration = max(now + lifetime_seconds, later)
        value = seal(self._identity, key, record, expiration)
        self._expirations[key] = expiration
        return await self.store.store(key, self._identity.peer_id, value, expiration)

    async def _keys_of(self, record: Announced) -> list[str]:
        match record:
            case PeerRecord(state=PeerState.LEAVING):
                # Also under keys at which it has just stopped announcing itself, and is still listed as serving.
                whole, now = keys.of_block(self._run_id, record.block), self._clock.time()
                listed = [key for key, end in self._expirations.items() if keys.whole_of(key) == whole and end > now]
                return sorted(listed) or [whole]
            case PeerRecord():
                return await self._block(record.block).places()
            case TrainerRecord():
                return [self._trainers.key]
            case ClaimRecord():
                return [self._claims.key]
            case AmendmentsRecord():
                return [self._amendments.key]
            case RunRecord():
                return [keys.RUNS]

    async def withdraw(self, block: Block) -> None:
        """List this peer as leaving a block, if it has announced itself there, for as long as its last record would
        have lasted. Raises PeerUnavailable if the DHT cannot be reached; the record then expires by itself."""
        if (announced := self._announced.get(block)) is not None:
            leaving = announced.model_copy(update={"state": PeerState.LEAVING, "announced_at": self._clock.time()})
            await self.announce(leaving, LEAVING_SECONDS)
            del self._announced[block]

    async def peers(self, block: Block) -> list[PeerRecord]:
        """All peers of a block, in any state. Raises PeerUnavailable."""
        return self._checked(block, await self._block(block).everyone())

    async def sample(self, block: Block, *, partly: bool = False, under_way: int = 0) -> list[PeerRecord]:
        """All peers of a block of a few dozen, in any state, and of a larger one some that stay the same; see SplitKey.
        Raises PeerUnavailable.

        `partly` asks only one of the DHT's nodes, for callers that ask again and again: unexpired records of earlier
        answers stay, and a later answer has the records that this one lacks.
        """
        is_own, leads = block in self._announced, block in self._led
        found = await self._block(block).sample(is_own=is_own, leads=leads, partly=partly, under_way=under_way)
        return self._checked(block, found)

    def lead(self, block: Block, leads: bool) -> None:
        """Note whether this process leads the rounds of a block. Its leader hears from all peers of the block, and has
        to know them."""
        self._led = self._led | {block} if leads else self._led - {block}

    def _checked(self, block: Block, found: list[PeerRecord]) -> list[PeerRecord]:
        staying = [record for record in found if record.state is not PeerState.LEAVING]
        self._note_releases(keys.of_block(self._run_id, block), staying)
        unmet = [record for record in staying if not PROTOCOLS.meets(Protocols.of(record))]
        self._listed[block] = len(staying) - len(unmet), unmet
        records = _compatible(found)
        for record in records:
            if record.dht_addresses:
                self.store.remember(record.dht_addresses)
        return [record for record in records if record.block == block]

    async def trainers(self, *, partly: bool = False) -> list[TrainerRecord]:
        """The trainers of the run; `partly` is as in `sample`. Raises PeerUnavailable."""
        found = await self._trainers.read(partly=partly)
        self._note_releases(self._trainers.key, found)
        return _compatible(found)

    async def members(self, blocks: Iterable[Block]) -> list[tuple[str, str]]:
        """The name and the certificates of each peer of these blocks and of each trainer that is listed. The
        certificates are empty in an open run without TLS. Raises PeerUnavailable."""
        peers = {record.peer_id: record for block in blocks for record in await self.peers(block)}
        await self.trainers()
        found: list[tuple[PeerRecord | TrainerRecord, str]] = [(one, one.certificate_pem) for one in peers.values()]
        found += self._trainers.signed()
        return [(record.display_name, chain_pem) for record, chain_pem in found]

    async def claims(self) -> list[ClaimRecord]:
        """The claims of peers that are about to serve a block, or were a moment ago. Raises PeerUnavailable."""
        return _compatible(await self._claims.read())

    async def amendments(self, *, partly: bool = True) -> list[AmendmentsRecord]:
        """The run's amendments, as each peer that announces some knows them; `partly` is as in `sample`. Raises
        PeerUnavailable."""
        return _compatible(await self._amendments.read(partly=partly))

    async def watch(
        self, blocks: Sequence[Block], on_update: Callable[[Block, Sequence[PeerRecord]], None],
        interval_seconds: float, *, under_way: Callable[[Block], int] = lambda block: 0,
    ) -> None:  # fmt: skip
        """Sample the blocks again and again, and call `on_update` with their peers, except while the DHT does not
        answer. `under_way` gives the number of microbatches that this process has there.

        Runs until cancelled. With more peers the intervals are longer, by `stretch`, because more records are read.
        They stay so short that a record expires only if two readings in a row miss its renewal.
        """
        lost = False
        while True:
            try:
                for block in blocks:
                    on_update(block, await self.sample(block, partly=True, under_way=under_way(block)))
                if lost:
                    logger.info("the DHT answers again")
                    self.num_returns += 1
                lost = False
            except PeerUnavailable as error:
                if not lost:
                    logger.warning("going on with the peers known so far: %s", error)
                lost = True
            num_peers = sum(self._block(block).num_known for block in blocks)
            await self._clock.sleep(interval_seconds * stretch(num_peers))

    def _block(self, block: Block) -> SplitKey:
        if block not in self._blocks:
            key, known = keys.of_block(self._run_id, block), partial(self._known, model=PeerRecord)
            self._blocks[block] = SplitKey(known, key, self._identity.peer_id, self._clock)
        return self._blocks[block]

    def _known(self, key: str, model: type[Record]) -> KnownRecords[Record]:
        return KnownRecords(self.store, key, model, self._identity.authority, self._clock)

    def require_common_protocol(self) -> None:
        """Raise IncompatibleVersion if half of the peers that a block was last read to have, or more, speak no protocol
        that this release speaks: this process would be in half a run. What fewer say need not be true."""
        for block, (met, unmet) in self._listed.items():
            if unmet and len(unmet) >= met:
                names = ", ".join(sorted(record.display_name for record in unmet)[:MOST_NAMED])
                spoken = _in_words({Protocols.of(record) for record in unmet})
                raise IncompatibleVersion(
                    f"{len(unmet)} of the {met + len(unmet)} peers of stage {block} ({names}) speak protocol {spoken}, "
                    f"and this release of swarm, which speaks {PROTOCOLS}, does not: three releases do not train "
                    "together, so update the oldest first"
                )

    def _note_releases(self, key: str, records: Sequence[PeerRecord | TrainerRecord]) -> None:
        """Say in the log when it changes which other releases are in the run."""
        self._spoken[key] = {Protocols.of(record) for record in records} - {PROTOCOLS}
        spoken = set[Protocols]().union(*self._spoken.values())
        if spoken == self._said:
            return
        self._said = spoken
        met = {each for each in spoken if PROTOCOLS.meets(each)}
        if spoken - met:
            logger.warning(
                "left out, since this release of swarm speaks protocol %s: peers that speak %s. Update the older ones",
                PROTOCOLS, _in_words(spoken - met),
            )  # fmt: skip
        if met:
            logger.info(
                "peers of another release are in the run, which speaks protocol %s, and this one %s: all train "
                "together, by protocol %d", _in_words(met), PROTOCOLS, common_protocol(met),
            )  # fmt: skip
        elif not spoken:
            logger.info("all peers in the run speak protocol %s now", PROTOCOLS)


def _compatible(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if PROTOCOLS.meets(Protocols.of(record))]


def _in_words(spoken: Collection[Protocols]) -> str:
    return ", ".join(map(str, sorted(spoken)[:MOST_NAMED]))


class Announcement:
    """A record that this process keeps in the DHT, where it expires if it is not renewed: so whatever has died is
    listed for no longer than a record's lifetime. It `is_refused` if it was not taken the last time."""

    def __init__(
        self, directory: Directory, what: str, record: Callable[[], Announced | None], clock: Clock, *,
        every_seconds: float = RENEW_SECONDS, occasion: Callable[[], object] | None = None, level: int = logging.DEBUG,
    ) -> None:  # fmt: skip
        """`occasion` gives a value whose change means that the record is to be announced at once, `record` None while
        there is nothing to announce, and `what` the announcement's name in the log."""
        self.is_refused = False
        self._directory = directory
        self._what = what
        self._record = record
        self._clock = clock
        self._every_seconds = every_seconds
        self._occasion = occasion
        self._level = level

    async def now(self, last: Announced | None = None) -> None:
        """Announce the record once, or in its place a `last` one, which is not renewed. The first of several failures
        is logged."""
        record = last or self._record()
        if record is None:
            return
        lifetime_seconds = self._every_seconds if last else NUM_RENEWALS * self._every_seconds
        try:
            await self._directory.announce(record, lifetime_seconds)
            if self.is_refused:
                logger.log(min(self._level, logging.INFO), "%s is announced again", self._what)
            self.is_refused = False
        except PeerUnavailable as error:
            if not self.is_refused:
                logger.log(self._level, "%s is not announced: %s", self._what, error)
            self.is_refused = True

    async def keep(self) -> None:
        look_seconds = LOOK_SECONDS if self._occasion else self._every_seconds
        while True:
            announced = self._occasion and self._occasion()
            await self.now()
            for _ in range(round(self._every_seconds / look_seconds)):
                await self._clock.sleep(look_seconds)
                if self._occasion and self._occasion() != announced:
                    break


def stretch(num_peers: int) -> float:
    """The factor by which `watch` makes its intervals longer when there are `num_peers` peers."""
    return min(MAX_STRETCH, max(1.0, num_peers / NUM_OFTEN))
