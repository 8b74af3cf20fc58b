"""A directory of a block with so many peers that its key is split, with a DHT in memory and a manual clock."""

from collections.abc import Sequence

import pytest

from swarm.credentials import identity
from swarm.dht import keys
from swarm.dht.directory import RENEW_SECONDS, Directory
from swarm.dht.known_records import KnownRecords
from swarm.dht.records import seal
from swarm.dht.split_key import KEPT
from swarm.types import Block, PeerRecord, PeerState
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore

RUN, BLOCK = "run.0123", Block(1)
PEERS = sorted((identity.generate() for _ in range(80)), key=lambda who: who.peer_id)
IDS = {who.peer_id for who in PEERS}


def _record(who: identity.Identity, clock: ManualClock) -> PeerRecord:
    return PeerRecord(
        peer_id=who.peer_id, announced_at=clock.time(), stage=1, endpoint="192.0.2.1:50051",
        certificate_pem=who.certificate_pem, state=PeerState.SERVING,
    )  # fmt: skip


class Swarm:
    def __init__(self, peers: Sequence[identity.Identity] = PEERS) -> None:
        self.clock = ManualClock(1000.0)
        self.store = MemoryStore(self.clock)
        self.peers = peers
        self.directories = [Directory(self.store, who, RUN, self.clock) for who in peers]
        self.reader = Directory(self.store, identity.generate(), RUN, self.clock)

    async def live(self, num_renewals: int) -> None:
        for _ in range(num_renewals):
            for who, directory in zip(self.peers, self.directories, strict=True):
                await directory.announce(_record(who, self.clock), 4 * RENEW_SECONDS)
                await directory.sample(BLOCK)
            self.clock.advance(RENEW_SECONDS)


async def test_of_many_peers_a_reader_knows_some_and_finds_all() -> None:
    swarm = Swarm()
    await swarm.live(6)
    first = keys.of_block(RUN, BLOCK)
    assert len(await swarm.store.get(first)) <= KEPT
    assert {record.peer_id for record in await swarm.reader.peers(BLOCK)} == IDS
    member = swarm.directories[-1]
    assert len(await member.sample(BLOCK)) < len(IDS)
    member.lead(BLOCK, True)
    assert {record.peer_id for record in await member.sample(BLOCK)} == IDS, "all report to the leader"
    member.lead(BLOCK, False)
    assert len(await member.sample(BLOCK)) < len(IDS)


async def test_who_leaves_is_listed_as_serving_under_none_of_its_keys() -> None:
    swarm = Swarm(PEERS[:60])
    await swarm.live(4)
    for directory in swarm.directories:
        await directory.withdraw(BLOCK)
    assert len(swarm.store.records) > 1, "the key is split"
    assert len(await swarm.reader.peers(BLOCK)) == len(swarm.peers)
    for key in swarm.store.records:
        known = KnownRecords(swarm.store, key, PeerRecord, None, swarm.clock)
        assert {record.state for record in await known.read()} <= {PeerState.LEAVING}


@pytest.mark.parametrize("bits", ["0", "1", "01", "10"])
async def test_a_part_of_a_key_takes_the_ids_that_begin_with_its_bits(bits: str) -> None:
    clock = ManualClock(1000.0)
    store, key = MemoryStore(clock), keys.part_of(keys.of_block(RUN, BLOCK), bits)
    for who in PEERS:
        await store.store(key, who.peer_id, seal(who, key, _record(who, clock), 1030.0), 1030.0)
    found = await KnownRecords(store, key, PeerRecord, None, clock).read()
    assert {record.peer_id for record in found} == {each for each in IDS if keys.bits_of(each).startswith(bits)}


def test_a_node_stores_what_belongs_to_a_part_of_its_runs_keys() -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord
    from hivemind.utils import MSGPackSerializer

    from swarm.dht.kademlia import new_validator

    clock = ManualClock(1000.0)
    validator = new_validator(clock)
    validator.belong_to(keys.of_run(RUN, [BLOCK]), None)
    who, first, pack = PEERS[0], keys.of_block(RUN, BLOCK), MSGPackSerializer.dumps

    def stores(key: str) -> bool:
        value = pack(seal(who, key, _record(who, clock), 1030.0))
        return validator.has_room(DHTRecord(DHTID.generate(key).to_bytes(), pack(who.peer_id), value, 1030.0))

    own = keys.bits_of(who.peer_id)
    other = "1" if own[0] == "0" else "0"
    assert [stores(key) for key in (first, f"{first}/{own[:1]}", f"{first}/{own}")] == [True] * 3
    foreign = (
        f"{first}/{other}", f"{first}/{own}0", f"{first}/", f"{first}/{own[0]}x", f"{keys.of_trainers(RUN)}/{own[0]}",
        f"{keys.of_block('other.0', BLOCK)}/{own[0]}",
    )  # fmt: skip
    assert [key for key in foreign if stores(key)] == []
