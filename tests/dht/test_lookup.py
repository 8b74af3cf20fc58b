"""What a peer answers about the DHT, and which of its answers are believed."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from swarm import config as configs
from swarm.credentials.identity import Identity, generate
from swarm.dht import keys, lookup
from swarm.dht.directory import Directory
from swarm.dht.discovery import discover_config
from swarm.dht.known_records import NoOtherNode
from swarm.dht.lookup import FRESH_SECONDS, MAX_REPLY_BYTES, DirectoryServicer, PeerStore
from swarm.dht.records import seal
from swarm.errors import PeerUnavailable, WrongRun
from swarm.rpc import probe, tls
from swarm.rpc.channels import ChannelPool
from swarm.rpc.endpoint import host_and_port
from swarm.rpc.entry import Entry
from swarm.rpc.probe import ProbeServicer
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1.directory_pb2_grpc import add_DirectoryServiceServicer_to_server
from swarm.rpc.v1.probe_pb2_grpc import add_ProbeServiceServicer_to_server
from swarm.types import Block, ClaimRecord, ClaimState, PeerId, PeerRecord, PeerState, RunRecord, TrainerRecord
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.proxy import Direction, Proxy

OURS, THEIRS = generate(), generate()
CONFIG = configs.load_preset("tiny")
RUN = CONFIG.run_id


class Store(MemoryStore):
    """A store that counts the lookups, and fails when it is told to."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.num_lookups = 0
        self.is_gone = False
        self.answers = asyncio.Event()
        self.answers.set()

    async def get(self, key: str, *, partly: bool = False) -> dict[str, tuple[bytes, float]]:
        self.num_lookups += 1
        await asyncio.sleep(0)
        await self.answers.wait()
        if self.is_gone:
            raise PeerUnavailable("the DHT did not answer")
        return await super().get(key)


class Alone(MemoryStore):
    """A node that has lost all others."""

    async def get(self, key: str, *, partly: bool = False) -> dict[str, tuple[bytes, float]]:
        raise NoOtherNode(await super().get(key))


class Swarm:
    """Peers that show one DHT, and the readers that ask them."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.dht = Store(self.clock)
        self._servers: dict[Identity, grpc.aio.Server] = {}
        self._readers: list[tuple[PeerStore, ChannelPool]] = []

    async def serve(self, identity: Identity, *, store: MemoryStore | None = None) -> PeerRecord:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        servicer = DirectoryServicer(
            store=store or self.dht, keys=keys.of_run(RUN, map(Block, range(2))), clock=self.clock
        )
        add_DirectoryServiceServicer_to_server(servicer, server)
        add_ProbeServiceServicer_to_server(ProbeServicer(is_exchanging=lambda: False, clock=self.clock), server)
        port = bind_server(server, "127.0.0.1", 0, tls.server_credentials(identity))
        await server.start()
        self._servers[identity] = server
        return PeerRecord(
            peer_id=identity.peer_id, announced_at=1000.0, stage=0, endpoint=f"127.0.0.1:{port}",
            certificate_pem=identity.certificate_pem, state=PeerState.SERVING,
        )  # fmt: skip

    async def stop(self, identity: Identity) -> None:
        await self._servers.pop(identity).stop(None)

    def reader(self, *records: PeerRecord) -> PeerStore:
        """A reader that knows the addresses of these peers."""
        own = generate()
        channels = ChannelPool(identity=own, clock=self.clock)
        entries = [Entry(PeerId(record.peer_id), record.endpoint) for record in records]
        store = PeerStore(entries, channels, own, insecure=False)
        self._readers.append((store, channels))
        return store

    async def close(self) -> None:
        for store, channels in self._readers:
            await store.close()
            await channels.close()
        for identity in list(self._servers):
            await self.stop(identity)


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    swarm = Swarm()
    yield swarm
    await swarm.close()


async def test_a_directory_reads_the_same_through_a_peer(swarm: Swarm) -> None:
    record = await swarm.serve(OURS)
    within = Directory(swarm.dht, OURS, RUN, swarm.clock)
    await within.announce(RunRecord(peer_id=OURS.peer_id, config_json=configs.to_json(CONFIG)), 60.0)
    await within.announce(record, 20.0)
    await within.announce(TrainerRecord(peer_id=OURS.peer_id, announced_at=1000.0, step=3), 20.0)
    claim = ClaimRecord(
        peer_id=OURS.peer_id, announced_at=1000.0, stage=1, state=ClaimState.CONFIRMED, claimed_at=1000.0
    )
    await within.announce(claim, 20.0)
    store = swarm.reader(record)
    assert (await discover_config(store, swarm.clock, address="")).run_id == RUN
    without = Directory(store, generate(), RUN, swarm.clock)
    assert [await without.peers(Block(stage)) for stage in range(2)] == [[record], []]
    assert [trainer.step for trainer in await without.trainers()] == [3]
    assert await without.claims() == [claim]


async def test_a_peer_that_makes_records_up_is_not_believed(swarm: Swarm) -> None:
    record, key = await swarm.serve(THEIRS), keys.of_block(RUN, Block(0))
    forged = record.model_copy(update={"peer_id": OURS.peer_id})
    await swarm.dht.store(key, OURS.peer_id, seal(THEIRS, key, forged, 1020.0), 1020.0)
    prolonged = seal(THEIRS, key, record, 1020.0)
    await swarm.dht.store(key, THEIRS.peer_id, prolonged, 1060.0)
    store = swarm.reader(record)
    assert len(await store.get(key)) == 2
    assert await Directory(store, generate(), RUN, swarm.clock).peers(Block(0)) == []


async def test_many_questions_cost_one_lookup(swarm: Swarm) -> None:
    record = await swarm.serve(OURS)
    readers = [swarm.reader(record) for _ in range(4)]
    await asyncio.gather(*(reader.get(keys.RUNS) for reader in readers for _ in range(5)))
    assert swarm.dht.num_lookups == 1
    swarm.clock.advance(FRESH_SECONDS + 0.1)
    await readers[0].get(keys.RUNS)
    await readers[0].get(keys.of_claims(RUN))
    assert swarm.dht.num_lookups == 3


async def test_a_peer_whose_dht_has_lost_all_others_still_shows_itself(swarm: Swarm) -> None:
    """It is passed over if another peer answers that knows of more nodes."""
    alone = Alone(swarm.clock)
    left, other = await swarm.serve(OURS, store=alone), await swarm.serve(THEIRS)
    await Directory(alone, OURS, RUN, swarm.clock).announce(left, 20.0)
    with pytest.raises(PeerUnavailable, match="no other node"):
        await Directory(alone, OURS, RUN, swarm.clock).peers(Block(0))
    assert await Directory(swarm.reader(left), generate(), RUN, swarm.clock).peers(Block(0)) == [left]
    await Directory(swarm.dht, THEIRS, RUN, swarm.clock).announce(other, 20.0)
    assert await Directory(swarm.reader(left, other), generate(), RUN, swarm.clock).peers(Block(0)) == [other]


async def test_nothing_is_looked_up_but_the_keys_of_the_run(swarm: Swarm) -> None:
    store = swarm.reader(await swarm.serve(OURS))
    for key in ("", "swarm.runs.", keys.of_block(RUN, Block(2)), keys.of_trainers("another")):
        with pytest.raises(WrongRun, match="is no key of the run"):
            await store.get(key)
    assert swarm.dht.num_lookups == 0


async def test_a_reply_is_bounded_and_says_so(swarm: Swarm, caplog: pytest.LogCaptureFixture) -> None:
    key = keys.of_block(RUN, Block(0))
    for number in range(5):
        await swarm.dht.store(key, str(number), bytes(MAX_REPLY_BYTES // 4), 1060.0)
    with caplog.at_level(logging.WARNING):
        found = await swarm.reader(await swarm.serve(OURS)).get(key)
    assert sorted(found) == ["0", "1", "2"]
    assert "2 more entries" in caplog.text


async def test_when_the_asked_peer_is_gone_another_one_is_asked(swarm: Swarm) -> None:
    first, second, third = [await swarm.serve(identity) for identity in (OURS, THEIRS, generate())]
    store = swarm.reader(first, second)
    await store.get(keys.RUNS)
    await swarm.stop(OURS)
    await store.get(keys.RUNS)
    store.learn([third])
    await swarm.stop(THEIRS)
    await store.get(keys.RUNS)


async def test_a_silent_peer_does_not_hold_up_the_next_one(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like an address to which there is no way, the silent peer takes connections and says nothing."""
    monkeypatch.setattr(lookup, "NEXT_SECONDS", 0.05)
    record = await swarm.serve(OURS)
    async with Proxy("127.0.0.1", 1) as nowhere, Proxy(*host_and_port(record.endpoint)) as silent:
        silent.stall()
        first, second = (record.model_copy(update={"endpoint": proxy.address}) for proxy in (silent, nowhere))
        assert await swarm.reader(first, second, record).get(keys.RUNS) == {}
        assert silent.num_connections == 1, "it is asked first"


async def test_a_path_that_loses_large_packets_is_called_that(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LONG_SECONDS", 0.2)
    monkeypatch.setattr(lookup, "ANSWER_SECONDS", 0.5)
    await swarm.dht.store(keys.RUNS, "", bytes(4000), 1060.0)
    record = await swarm.serve(OURS)
    async with Proxy(*host_and_port(record.endpoint)) as path:
        path.links[Direction.TO_CLIENT].largest_bytes = 1300
        reader = swarm.reader(record.model_copy(update={"endpoint": path.address}))
        with pytest.raises(PeerUnavailable, match="none that takes several packets: something in between"):
            await reader.get(keys.RUNS)
    assert len(await swarm.reader(record).get(keys.RUNS)) == 1
