"""The directory, with a DHT in memory and a manual clock."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from swarm.credentials import identity
from swarm.credentials.rights import Role
from swarm.dht.directory import NUM_RENEWALS, RENEW_SECONDS, Announcement, Directory
from swarm.dht.records import MAX_LIFETIME_SECONDS, seal
from swarm.errors import IncompatibleVersion, PeerUnavailable
from swarm.machine.clock import DOUBT_SECONDS
from swarm.types import PROTOCOLS, Block, PeerRecord, PeerState, Protocols, TrainerRecord
from tests.support import locked
from tests.support.manual_clock import ManualClock, SetClock
from tests.support.memory_store import MemoryStore
from tests.support.virtual_time import LoopClock, in_virtual_time

OURS, THEIRS = identity.generate(), identity.generate()
RUN = "run.0123"


class Store(MemoryStore):
    """A DHT that can be cut off."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.is_gone = False
        self.num_gets = 0
        self.remembered: list[str] = []

    async def get(self, key: str, *, partly: bool = False) -> dict[str, tuple[bytes, float]]:
        self.num_gets += 1
        if self.is_gone:
            raise PeerUnavailable("gone")
        return await super().get(key)

    def remember(self, addresses: Sequence[str]) -> None:
        self.remembered += addresses


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def store(clock: ManualClock) -> Store:
    return Store(clock)


def _record(who: identity.Identity, **fields: Any) -> PeerRecord:
    values = {
        "peer_id": who.peer_id, "announced_at": 1000.0, "stage": 1, "endpoint": "192.0.2.1:50051",
        "certificate_pem": who.certificate_pem, "state": PeerState.SERVING,
    }  # fmt: skip
    return PeerRecord.model_validate({**values, **fields})


async def test_peers_find_each_other(store: Store, clock: ManualClock) -> None:
    ours, theirs = Directory(store, OURS, RUN, clock), Directory(store, THEIRS, RUN, clock)
    await ours.announce(_record(OURS), 30)
    addresses = ("/ip4/192.0.2.2/tcp/1/p2p/X", "/ip6/2001:db8::2/tcp/1/p2p/X")
    await theirs.announce(_record(THEIRS, dht_address=addresses[0], other_dht_addresses=addresses[1:]), 60)
    assert {record.peer_id for record in await ours.peers(Block(1))} == {OURS.peer_id, THEIRS.peer_id}
    assert await ours.peers(Block(0)) == []
    assert store.remembered == list(addresses)
    clock.advance(31)
    assert [record.peer_id for record in await ours.peers(Block(1))] == [THEIRS.peer_id]


async def test_who_says_that_it_announced_itself_in_the_future_is_left_out(store: Store, clock: ManualClock) -> None:
    ours, theirs = Directory(store, OURS, RUN, clock), Directory(store, THEIRS, RUN, clock)
    await ours.announce(_record(OURS), 30)
    await theirs.announce(_record(THEIRS, announced_at=1000.0 + MAX_LIFETIME_SECONDS + 1), MAX_LIFETIME_SECONDS)
    assert [record.peer_id for record in await ours.peers(Block(1))] == [OURS.peer_id]


async def test_of_two_records_on_their_way_the_newer_one_stays(store: Store, clock: ManualClock) -> None:
    ours = Directory(store, OURS, RUN, clock)
    await ours.announce(_record(OURS), 10)
    first_may_go = asyncio.Event()
    store_at_once = store.store

    async def slow_store(key: str, subkey: str, value: bytes, expiration: float) -> bool:
        await first_may_go.wait()
        return await store_at_once(key, subkey, value, expiration)

    store.store = slow_store  # type: ignore[method-assign]
    late = asyncio.create_task(ours.announce(_record(OURS), 60))
    await asyncio.sleep(0)
    store.store = store_at_once  # type: ignore[method-assign]
    await ours.withdraw(Block(1))
    first_may_go.set()
    with pytest.raises(PeerUnavailable):
        await late
    assert [record.state for record in await ours.peers(Block(1))] == [PeerState.LEAVING]


async def test_a_shorter_life_replaces_a_longer_one(store: Store, clock: ManualClock) -> None:
    """The new record counts although the DHT keeps the one that expires last."""
    directory = Directory(store, OURS, RUN, clock)
    await directory.announce(_record(OURS, queue_length=1), 60)
    await directory.announce(_record(OURS, queue_length=2), 10)
    assert [record.queue_length for record in await directory.peers(Block(1))] == [2]


async def test_a_peer_is_listed_at_each_block_that_it_serves_until_it_leaves_that_one(
    store: Store, clock: ManualClock
) -> None:
    directory, reader = Directory(store, OURS, RUN, clock), Directory(store, THEIRS, RUN, clock)
    blocks = (Block(1), Block(2), Block(2, 1))

    async def states() -> list[list[PeerState]]:
        return [[record.state for record in await reader.peers(block)] for block in blocks]

    for block in blocks:
        await directory.announce(_record(OURS, stage=block.stage, variant=block.variant), 60)
    assert await states() == [[PeerState.SERVING]] * 3
    await directory.withdraw(Block(2))
    assert await states() == [[PeerState.SERVING], [PeerState.LEAVING], [PeerState.SERVING]]
    await directory.withdraw(Block(2))
    await directory.withdraw(Block(7))
    assert len(store.records[f"{RUN}.stage.2.1"]) == 1
    assert f"{RUN}.stage.7" not in store.records, "what was not announced is not withdrawn"


@pytest.mark.parametrize(
    "lie",
    [
        {"peer_id": OURS.peer_id, "certificate_pem": THEIRS.certificate_pem},
        {"peer_id": THEIRS.peer_id, "certificate_pem": OURS.certificate_pem},
        {"peer_id": THEIRS.peer_id, "certificate_pem": "none"},
        {"stage": 0},
    ],
)
async def test_what_a_signer_may_not_say_is_left_out(store: Store, clock: ManualClock, lie: dict[str, Any]) -> None:
    """A valid signature does not give the right to speak for others."""
    key = f"{RUN}.stage.1"
    await store.store(key, THEIRS.peer_id, seal(THEIRS, key, _record(THEIRS, **lie), 1060.0), 1060.0)
    directory = Directory(store, OURS, RUN, clock)
    await directory.announce(_record(OURS), 30)
    assert [record.peer_id for record in await directory.peers(Block(1))] == [OURS.peer_id]


async def test_releases_without_a_protocol_in_common_are_left_out_and_said_once(
    store: Store, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Directory(store, OURS, RUN, clock), Directory(store, THEIRS, RUN, clock)
    newer = PROTOCOLS.newest + 1
    await theirs.announce(_record(THEIRS, protocol_version=newer, oldest_protocol=newer), 30)
    for _ in range(3):
        assert await ours.peers(Block(1)) == []
    assert caplog.messages == [
        f"left out, since this release of swarm speaks protocol {PROTOCOLS}: peers that speak {newer}. Update the "
        "older ones"
    ]
    clock.advance(31)
    assert await ours.peers(Block(1)) == []
    await theirs.announce(_record(THEIRS, protocol_version=newer, oldest_protocol=newer), 30)
    assert await ours.peers(Block(1)) == []
    assert len(caplog.messages) == 2


async def test_peers_of_the_next_release_count_and_are_said_until_they_are_gone(
    store: Store, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ours, theirs = Directory(store, OURS, RUN, clock), Directory(store, THEIRS, RUN, clock)
    await theirs.announce(_record(THEIRS, protocol_version=PROTOCOLS.newest + 1), 30)
    trainer = TrainerRecord(peer_id=THEIRS.peer_id, announced_at=1000.0, protocol_version=PROTOCOLS.newest + 1)
    await theirs.announce(trainer, 30)
    for _ in range(3):
        assert [record.peer_id for record in await ours.peers(Block(1))] == [THEIRS.peer_id]
        assert [record.peer_id for record in await ours.trainers()] == [THEIRS.peer_id]
    newer = Protocols(PROTOCOLS.oldest, PROTOCOLS.newest + 1)
    said = [
        f"peers of another release are in the run, which speaks protocol {newer}, and this one {PROTOCOLS}: all train "
        f"together, by protocol {PROTOCOLS.newest}"
    ]
    assert caplog.messages == said
    await theirs.withdraw(Block(1))
    assert len(await ours.peers(Block(1))) == 1
    assert caplog.messages == said, "its trainer stays"
    clock.advance(31)
    assert await ours.trainers() == []
    assert caplog.messages == [*said, f"all peers in the run speak protocol {PROTOCOLS} now"]


async def test_a_record_holds_until_it_expires(store: Store, clock: ManualClock) -> None:
    """A reading that misses some records, as after a neighbour's death, loses none."""
    directory = Directory(store, OURS, RUN, clock)
    await directory.announce(_record(OURS), 30)
    assert len(await directory.peers(Block(1))) == 1
    store.records.clear()
    assert len(await directory.peers(Block(1))) == 1
    clock.advance(31)
    assert await directory.peers(Block(1)) == []


@pytest.mark.parametrize("ahead", [100.0, -1000.0])
async def test_a_clock_that_is_set_for_a_while_makes_nobody_vanish(
    store: Store, clock: ManualClock, ahead: float
) -> None:
    """Peers stay, though records last for less time than the clock is in doubt, and new ones cannot be read then."""
    ours = SetClock(1000.0)
    directory = Directory(store, OURS, RUN, ours)
    await Directory(store, THEIRS, RUN, clock).announce(_record(THEIRS), 20)
    assert len(await directory.peers(Block(1))) == 1
    ours.ahead = ahead
    assert len(await directory.peers(Block(1))) == 1
    for own in (clock, ours):
        own.advance(DOUBT_SECONDS - 1)
    assert len(await directory.peers(Block(1))) == 1, "for all that is known, the clock is wrong"
    ours.ahead = 0.0
    assert len(await directory.peers(Block(1))) == 1, "it was, and is not believed at once either"
    await Directory(store, THEIRS, RUN, clock).announce(_record(THEIRS), 40)
    for own in (clock, ours):
        own.advance(DOUBT_SECONDS)
    assert len(await directory.peers(Block(1))) == 1
    for own in (clock, ours):
        own.advance(11.0)
    assert await directory.peers(Block(1)) == []


async def test_a_clock_that_stays_where_it_was_set_is_believed_in_the_end(store: Store, clock: ManualClock) -> None:
    ours = SetClock(1000.0)
    directory = Directory(store, OURS, RUN, ours)
    await Directory(store, THEIRS, RUN, clock).announce(_record(THEIRS), 90)
    assert len(await directory.peers(Block(1))) == 1
    ours.ahead = 100.0
    assert len(await directory.peers(Block(1))) == 1
    ours.advance(DOUBT_SECONDS)
    assert await directory.peers(Block(1)) == [], "now it holds, and so does the record's end"


class Strict(Store):
    """A DHT whose nodes have the right time, and refuse records that last too long."""

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
        far = expiration > self._clock.time() + MAX_LIFETIME_SECONDS
        return not far and await super().store(key, subkey, value, expiration)


@pytest.mark.parametrize("ahead", [50.0, 100.0, 100.5, 1000.0])
async def test_a_clock_that_was_ahead_leaves_a_peer_that_can_announce_itself(clock: ManualClock, ahead: float) -> None:
    store, ours = Strict(clock), SetClock(1000.0)
    directory = Directory(store, OURS, RUN, ours)
    ours.ahead = ahead
    with contextlib.suppress(PeerUnavailable):
        await directory.announce(_record(OURS, queue_length=1), 20)
    ours.ahead = 0.0
    for own in (clock, ours):
        own.advance(1.0)
    await directory.announce(_record(OURS, queue_length=2), 20)
    reader = Directory(store, THEIRS, RUN, clock)
    assert [record.queue_length for record in await reader.peers(Block(1))] == [2]


async def _advance(clock: ManualClock, seconds: float) -> None:
    for _ in range(5):
        await asyncio.sleep(0)
    clock.advance(seconds)
    for _ in range(5):
        await asyncio.sleep(0)


async def test_watching_survives_the_loss_of_the_dht(
    store: Store, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seen: list[tuple[int, int]] = []

    def on_update(block: Block, records: Sequence[PeerRecord]) -> None:
        seen.append((block.stage, len(records)))

    directory = Directory(store, OURS, RUN, clock)
    await directory.announce(_record(OURS), 60)
    watching = asyncio.create_task(directory.watch([Block(0), Block(1)], on_update, 2.0))
    await _advance(clock, 0)
    assert seen == [(0, 0), (1, 1)]
    store.is_gone = True
    await _advance(clock, 2)
    await _advance(clock, 2)
    assert seen == [(0, 0), (1, 1)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    store.is_gone = False
    await _advance(clock, 2)
    assert seen == [(0, 0), (1, 1)] * 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    assert watching.cancelled()


async def test_many_peers_are_read_less_often(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each peer reads the records of all, so the load would grow with the square of their number."""
    monkeypatch.setattr("swarm.dht.directory.NUM_OFTEN", 1)
    read_at: list[float] = []
    directory = Directory(store, OURS, RUN, clock)
    watching = asyncio.create_task(directory.watch([Block(1)], lambda *_: read_at.append(clock.time()), 2.0))
    for who in (OURS, THEIRS, *(identity.generate() for _ in range(4))):
        await _advance(clock, 0)
        await Directory(store, who, RUN, clock).announce(_record(who), 60)
        for _ in range(12):
            await _advance(clock, 0.5)
    gaps = [round(later - earlier, 6) for earlier, later in itertools.pairwise(read_at)]
    assert sorted(set(gaps)) == [2.0, 4.0, 6.0]
    assert gaps == sorted(gaps)
    # A DHT that is overloaded and does not answer is not asked more often either.
    store.is_gone, asked = True, store.num_gets
    for _ in range(24):
        await _advance(clock, 0.5)
    assert store.num_gets - asked == 2
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_members_see_members_alone() -> None:
    now = ManualClock(locked.NOW.timestamp())
    store = Store(now)
    for who in (locked.PEER, locked.OPEN, locked.EXPIRED, locked.FOREIGN, locked.TRAINER):
        directory = Directory(store, who, RUN, now)
        await directory.announce(_record(who, announced_at=now.time()), 30)
        await directory.announce(TrainerRecord(peer_id=who.peer_id, announced_at=now.time()), 30)
    reader = Directory(store, locked.OTHER_PEER, RUN, now)
    assert [record.peer_id for record in await reader.peers(Block(1))] == [locked.PEER.peer_id]
    assert {record.peer_id for record in await reader.trainers()} == {locked.PEER.peer_id, locked.TRAINER.peer_id}
    assert len(await Directory(store, locked.OPEN, RUN, now).peers(Block(1))) == 5


@in_virtual_time
async def test_an_announcement_is_renewed_at_once_on_an_occasion_and_tells_its_first_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    stored = list[tuple[float, float]]()
    occasion, refuses = 0, False
    present: PeerRecord | None = _record(OURS)

    class Refusing(MemoryStore):
        async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
            stored.append((now.monotonic(), expiration - now.time()))
            return not refuses

    now = LoopClock()
    announcement = Announcement(
        Directory(Refusing(now), OURS, RUN, now), "this peer", lambda: present, now, occasion=lambda: occasion,
        level=logging.WARNING,
    )  # fmt: skip
    keeping = asyncio.create_task(announcement.keep())
    await now.sleep(12.2)
    occasion = 1
    await now.sleep(1.0)
    assert [at for at, _ in stored] == pytest.approx([0.0, 5.0, 10.0, 12.5])
    assert [seconds for _, seconds in stored] == pytest.approx([NUM_RENEWALS * RENEW_SECONDS] * 4)
    assert (caplog.messages, announcement.is_refused) == ([], False)
    refuses = True
    await now.sleep(15.0)
    assert announcement.is_refused
    refuses = False
    await now.sleep(15.0)
    first, second = caplog.messages
    assert first.startswith("this peer is not announced: no other node of the DHT took")
    assert (second, announcement.is_refused) == ("this peer is announced again", False)
    present, num_stored = None, len(stored)
    await now.sleep(15.0)
    assert len(stored) == num_stored, "there is nothing to announce"
    keeping.cancel()


async def test_a_newcomer_that_half_of_a_block_does_not_understand_refuses_to_join(
    store: Store, clock: ManualClock
) -> None:
    newer = PROTOCOLS.newest + 1
    others = [identity.generate() for _ in range(3)]
    for other, protocols in zip(others, ((newer, newer), *2 * [(newer, PROTOCOLS.newest)]), strict=True):
        spoken = dict(zip(("protocol_version", "oldest_protocol"), protocols, strict=True))
        record = _record(other, name=f"peer-{protocols[1]}", **spoken)
        await Directory(store, other, RUN, clock).announce(record, 30 if protocols[1] == newer else 10)
    ours = Directory(store, OURS, RUN, clock)
    ours.require_common_protocol()
    assert len(await ours.peers(Block(1))) == 2
    ours.require_common_protocol()
    clock.advance(11)
    assert await ours.peers(Block(1)) == []
    with pytest.raises(
        IncompatibleVersion, match=rf"^1 of the 1 peers of stage 1 \(peer-{newer}\) speak protocol {newer},"
    ):
        ours.require_common_protocol()


async def test_whose_token_is_revoked_is_listed_no_longer(store: Store) -> None:
    clock = ManualClock(locked.NOW.timestamp())
    token, trainers = locked.issue(), locked.issue(Role.TRAINER)
    own, ours, theirs = locked.PEER, locked.OTHER_PEER, token.admit(identity.generate())
    reader = dataclasses.replace(own, authority=locked.OWNER.authority)
    directory = Directory(store, reader, RUN, clock)
    for peer in (ours, theirs):
        record = _record(peer).model_copy(update={"announced_at": clock.time(), "name": peer.peer_id[:4]})
        await Directory(store, peer, RUN, clock).announce(record, 30)
    trainer = trainers.admit(identity.generate())
    said = TrainerRecord(peer_id=trainer.peer_id, announced_at=clock.time(), name="trainer", step=0)
    await Directory(store, trainer, RUN, clock).announce(said, 30)
    assert set(await directory.members([Block(1)])) == {
        *((peer.peer_id[:4], peer.certificate_pem) for peer in (ours, theirs)),
        ("trainer", trainer.certificate_pem),
    }
    assert reader.authority is not None
    reader.authority.revoke([token.token_id, trainers.token_id])
    assert [record.peer_id for record in await directory.sample(Block(1))] == [ours.peer_id]
    assert await directory.trainers() == []
    assert [name for name, _ in await directory.members([Block(1)])] == [ours.peer_id[:4]]
    await Directory(store, theirs, RUN, clock).announce(_record(theirs), 40)
    assert [record.peer_id for record in await directory.peers(Block(1))] == [ours.peer_id]
