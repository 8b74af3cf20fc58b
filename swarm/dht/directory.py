"""The directory of a run: who serves which stage, who trains, and what the run is.

Peers and trainers announce themselves here and look each other up; routers are fed by `watch`. It works over any
RecordStore: DhtNode, or MemoryStore, its twin for tests. Every record is signed and checked. Never talks to the peers
it lists, and decides nothing about them.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Annotated, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from swarm import config
from swarm.credentials.authority import Authority
from swarm.credentials.certificates import bearer_of, peer_id_of
from swarm.credentials.identity import Identity
from swarm.dht import keys
from swarm.dht.quota import MAX_OWNER_RECORDS, KeyQuota
from swarm.dht.records import MAX_LIFETIME_SECONDS, open_record, seal, signed_by
from swarm.errors import IncompatibleVersion, IntegrityError, MalformedMessage, NotAllowed, PeerUnavailable
from swarm.machine.clock import Clock, SteadyTime
from swarm.types import PROTOCOL_VERSION, ClaimRecord, PeerRecord, PeerState, TrainerRecord

logger = logging.getLogger(__name__)

LEAVING_SECONDS = 5.0
"""For how long a peer that left is at least listed as leaving."""
NUM_OFTEN, MAX_STRETCH = 32, 3.0
"""Up to NUM_OFTEN peers are read at the interval asked for; with more it grows in proportion, to MAX_STRETCH times."""


class NoOtherNode(PeerUnavailable):
    """The DHT is down to this machine's own node.

    Attributes:
        found: what that node stores itself.
    """

    def __init__(self, found: dict[str, tuple[bytes, float]]) -> None:
        super().__init__("no other node of the DHT answers")
        self.found = found


class RecordStore(Protocol):
    """What a directory needs of the DHT."""

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
        """False if the record was refused. Raises PeerUnavailable."""
        ...

    async def get(self, key: str, *, partly: bool = False) -> dict[str, tuple[bytes, float]]:
        """Subkey -> (value, expiration); `partly`: cheaply, and a record may be missed. Raises PeerUnavailable,
        NoOtherNode for one."""
        ...

    def remember(self, address: str) -> None:
        """Another node's address, for when the known ones are gone."""
        ...


class MemoryStore:
    """A DHT in one process: give it to several directories. Keeps the farthest expiry, as the DHT does."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._values: dict[str, dict[str, tuple[bytes, float]]] = {}

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
        values = self._values.setdefault(key, {})
        if expiration <= max(values.get(subkey, (b"", 0.0))[1], self._clock.time()):
            return False
        values[subkey] = (value, expiration)
        return True

    async def get(self, key: str, *, partly: bool = False) -> dict[str, tuple[bytes, float]]:
        now = self._clock.time()
        return {subkey: found for subkey, found in self._values.get(key, {}).items() if found[1] > now}

    def remember(self, address: str) -> None:
        pass


class RunRecord(BaseModel):
    """A peer's statement of what its run is: key `swarm.runs`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    peer_id: str
    protocol_version: int = PROTOCOL_VERSION
    config_json: Annotated[str, Field(max_length=12_000)]


Record = TypeVar("Record", PeerRecord, TrainerRecord, ClaimRecord, RunRecord)


class _Key(Generic[Record]):
    """One key of the DHT, as far as it has been read: a record holds until it expires, even if a reading misses it.

    A machine whose clock is set would see nobody any more, since it takes what others announce for expired, or for
    lasting too long. So nothing expires until the clock is believed.
    """

    def __init__(self, name: str, model: type[Record], authority: Authority | None, clock: Clock) -> None:
        self.name = name
        self._clock = clock
        self._steady_time = SteadyTime(clock)
        self._authority = authority
        self._model: type[Record] = model
        self._known: dict[str, tuple[Record, float]] = {}
        self._quota = KeyQuota()
        """A node of the DHT may answer with any number of records that it has made up."""

    @property
    def num_known(self) -> int:
        """Records that held at the last reading that was answered."""
        return len(self._known)

    async def read(self, store: RecordStore, *, partly: bool = False) -> list[Record]:
        """All that hold now, of whatever protocol version. Raises PeerUnavailable."""
        found = await store.get(self.name, partly=partly)
        now = self._clock.time()
        for subkey, (value, expiration) in found.items():
            if subkey not in self._known or expiration > self._known[subkey][1]:
                try:
                    record = open_record(self._model, self.name, subkey, value, expiration, now, self._authority)
                    _require_own(record, subkey)
                except (IntegrityError, MalformedMessage, NotAllowed) as error:
                    logger.debug("left out: %s", error)
                else:
                    owner = bearer_of(signed_by(value)) if self._authority is not None else None
                    if self._quota.take(subkey, owner, len(value), expiration, now):
                        self._known[subkey] = (record, expiration)
        steady_now = self._steady_time.now()
        if not self._steady_time.is_in_doubt:
            self._known = {subkey: known for subkey, known in self._known.items() if known[1] > steady_now}
        return [record for record, _ in self._known.values()]


class Directory:
    """One peer's view of the directory, and its own entries in it. A member of a locked run sees members alone."""

    def __init__(self, store: RecordStore, identity: Identity, run_id: str, clock: Clock) -> None:
        self._store = store
        self._identity = identity
        self._run_id = run_id
        self._clock = clock
        self._stages: dict[int, _Key[PeerRecord]] = {}
        self._trainers = _Key(keys.of_trainers(run_id), TrainerRecord, identity.authority, clock)
        self._claims = _Key(keys.of_claims(run_id), ClaimRecord, identity.authority, clock)
        self._announced: PeerRecord | None = None
        self._expirations: dict[str, float] = {}
        self._has_incompatible: set[str] = set()
        """Keys under which somebody is left out."""

    @property
    def store(self) -> RecordStore:
        """What it reads, for those who pass records on as they are."""
        return self._store

    async def announce_peer(self, record: PeerRecord, lifetime_seconds: float) -> None:
        """List this peer under its stage, for at most `records.MAX_LIFETIME_SECONDS`.

        Raises:
            PeerUnavailable: the DHT cannot be reached, or refused the record.
        """
        await self._announce(self._stage(record.stage).name, record, lifetime_seconds)
        self._announced = record

    async def announce_trainer(self, record: TrainerRecord, lifetime_seconds: float) -> None:
        """List this trainer. Raises PeerUnavailable as `announce_peer` does."""
        await self._announce(self._trainers.name, record, lifetime_seconds)

    async def announce_claim(self, record: ClaimRecord, lifetime_seconds: float) -> None:
        """Say where this peer is about to serve. Raises PeerUnavailable as `announce_peer` does."""
        await self._announce(self._claims.name, record, lifetime_seconds)

    async def publish_config(self, config_json: str, lifetime_seconds: float) -> None:
        """State what the run is, for `discover_config`. Raises PeerUnavailable as `announce_peer` does."""
        record = RunRecord(peer_id=self._identity.peer_id, config_json=config_json)
        await self._announce(keys.RUNS, record, lifetime_seconds)

    async def withdraw(self) -> None:
        """List this peer as leaving the stage it last announced, for as long as its last record would have held.

        Raises:
            PeerUnavailable: the DHT cannot be reached; the record expires by itself.
        """
        if self._announced is not None:
            leaving = self._announced.model_copy(
                update={"state": PeerState.LEAVING, "announced_at": self._clock.time()}
            )
            await self.announce_peer(leaving, LEAVING_SECONDS)
            self._announced = None

    async def peers(self, stage: int, *, partly: bool = False) -> list[PeerRecord]:
        """The peers of a stage, in whatever state. Raises PeerUnavailable.

        Args:
            partly: for who asks again and again: one of the DHT's nodes is asked and not all. What an earlier answer
                had is not lost, and what this one misses another one has.
        """
        key = self._stage(stage)
        records = self._compatible(key, await key.read(self._store, partly=partly))
        for record in records:
            if record.dht_address:
                self._store.remember(record.dht_address)
        return [record for record in records if record.stage == stage]

    async def trainers(self) -> list[TrainerRecord]:
        """The trainers of the run. Raises PeerUnavailable."""
        return self._compatible(self._trainers, await self._trainers.read(self._store))

    async def claims(self) -> list[ClaimRecord]:
        """Who is about to serve which stage, or has been lately. Raises PeerUnavailable."""
        return self._compatible(self._claims, await self._claims.read(self._store))

    async def watch(
        self,
        stages: Sequence[int],
        on_update: Callable[[int, Sequence[PeerRecord]], None],
        interval_seconds: float,
    ) -> None:
        """Read the stages again and again, and tell `on_update`; while the DHT is gone it is told nothing.

        Runs until it is cancelled. The more peers there are the longer are the intervals, by `stretch`, since each of
        them reads of all of them; yet not so long that records expire in between, if no two readings in a row miss one.
        """
        lost = False
        while True:
            try:
                for stage in stages:
                    on_update(stage, await self.peers(stage, partly=True))
                if lost:
                    logger.info("the DHT answers again")
                lost = False
            except PeerUnavailable as error:
                if not lost:
                    logger.warning("going on with the peers known so far: %s", error)
                lost = True
            num_peers = sum(self._stage(stage).num_known for stage in stages)
            await self._clock.sleep(interval_seconds * stretch(num_peers))

    def _stage(self, stage: int) -> _Key[PeerRecord]:
        if stage not in self._stages:
            name = keys.of_stage(self._run_id, stage)
            self._stages[stage] = _Key(name, PeerRecord, self._identity.authority, self._clock)
        return self._stages[stage]

    def _compatible(self, key: _Key[Record], records: list[Record]) -> list[Record]:
        compatible = [record for record in records if record.protocol_version == PROTOCOL_VERSION]
        num_others = len(records) - len(compatible)
        if not num_others:
            self._has_incompatible.discard(key.name)
        elif key.name not in self._has_incompatible:
            self._has_incompatible.add(key.name)
            logger.warning("left out, since they run another release of swarm: %d under %s", num_others, key.name)
        return compatible

    async def _announce(self, key: str, record: BaseModel, lifetime_seconds: float) -> None:
        now = self._clock.time()
        # The DHT keeps the farthest expiry, so no record may expire before the one it replaces, be it still on its way.
        later = self._expirations.get(key, 0.0) + 0.001
        if later > now + MAX_LIFETIME_SECONDS:
            # Announced while the clock was ahead: nobody took that, nor would anybody take what lasts as long.
            later = 0.0
        expiration = max(now + lifetime_seconds, later)
        value = seal(self._identity, key, record, expiration)
        self._expirations[key] = expiration
        stored = await self._store.store(key, self._identity.peer_id, value, expiration)
        if not stored:
            raise PeerUnavailable(
                "the DHT refused this peer's record: is this machine's clock right, does its token hold, and do at "
                f"most {MAX_OWNER_RECORDS} processes use that token?"
            )


def stretch(num_peers: int) -> float:
    """How many times as long as asked for the intervals of `watch` are, with so many peers."""
    return min(MAX_STRETCH, max(1.0, num_peers / NUM_OFTEN))


async def discover_config(
    store: RecordStore, clock: Clock, *, address: str, authority: Authority | None = None
) -> config.RunConfig:
    """What run the peers at `address` (named in errors only) train.

    Args:
        authority: the owner of the run that is looked for, as the token names it; None for an open run.

    Raises:
        PeerUnavailable: no DHT, or nobody announces a run.
        ValueError: there are several runs, the run's configuration makes no sense to this version, it is locked and
            there is no token, or the token is for another run.
        IncompatibleVersion: the run speaks another protocol version.
    """
    runs, faults = await _announced_runs(store, clock, address, authority)
    if authority is not None:
        runs = {run_id: found for run_id, found in runs.items() if found.owner == authority.fingerprint}
    if len(runs) > 1:
        names = ", ".join(sorted(runs))
        raise ValueError(f"several runs share the DHT at {address}: {names}; start every run on a DHT of its own")
    if runs:
        found = next(iter(runs.values()))
        if found.owner and authority is None:
            raise ValueError(
                f"the run at {address} is locked: ask its owner for a token, and join with {address}#TOKEN"
            )
        return found
    if faults:
        raise faults[0]
    if authority is not None:
        others, _ = await _announced_runs(store, clock, address, None)
        for other in others.values():
            theirs = f"is owned by {other.owner[:16]}" if other.owner else "is open"
            raise ValueError(
                f"the token is for the run of owner {authority.fingerprint[:16]}, and the run at {address} {theirs}: "
                "take the address and the token from one line"
            )
    raise PeerUnavailable(f"no run is announced at {address}: is a swarm-peer running there?")


async def _announced_runs(
    store: RecordStore, clock: Clock, address: str, authority: Authority | None
) -> tuple[dict[str, config.RunConfig], list[Exception]]:
    """The configurations by run, and what is wrong with those that cannot be read."""
    runs: dict[str, config.RunConfig] = {}
    faults: list[Exception] = []
    for record in await _Key(keys.RUNS, RunRecord, authority, clock).read(store):
        if record.protocol_version != PROTOCOL_VERSION:
            faults.append(
                IncompatibleVersion(
                    f"the run at {address} speaks protocol version {record.protocol_version} and this software "
                    f"{PROTOCOL_VERSION}: install the version that the other peers have"
                )
            )
            continue
        try:
            found = config.from_json(record.config_json, source=f"the configuration of the run at {address}")
        except ValueError as error:
            faults.append(error)
        else:
            # Named by its digest, which is computed here: a record cannot claim another run's name.
            runs[found.run_id] = found
    return runs, faults


def _require_own(record: PeerRecord | TrainerRecord | ClaimRecord | RunRecord, subkey: str) -> None:
    if record.peer_id != subkey:
        raise IntegrityError(f"{subkey} announces {record.peer_id}")
    if isinstance(record, PeerRecord) and record.certificate_pem and peer_id_of(record.certificate_pem) != subkey:
        raise IntegrityError(f"{subkey} announces somebody else's certificate")
