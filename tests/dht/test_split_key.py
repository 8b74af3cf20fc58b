"""A stage's key that is split while many peers are listed, with keys in memory and a manual clock."""

import asyncio
import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from swarm.dht.directory import NUM_RENEWALS, RENEW_SECONDS
from swarm.dht.keys import bits_of, takes
from swarm.dht.split_key import GO_DOWN, KEPT, LEAST_POINTS, NUM_HEIRS, SPLIT, UPPER_SECONDS, SplitKey
from swarm.errors import PeerUnavailable
from swarm.types import PeerRecord, PeerState
from tests.support.manual_clock import ManualClock

KEY = "run.0123.stage.1"
LIFETIME_SECONDS = NUM_RENEWALS * RENEW_SECONDS


class Known:
    """One reader's records under one key of a swarm."""

    def __init__(self, swarm: "Swarm", key: str) -> None:
        self._swarm, self._key = swarm, key

    async def read(self, *, partly: bool = False) -> list[PeerRecord]:
        if self._swarm.is_gone:
            raise PeerUnavailable("gone")
        self._swarm.num_read += len(self.present())
        return self.present()

    def present(self) -> list[PeerRecord]:
        now = self._swarm.clock.time()
        return [record for record, until in self._swarm.listed[self._key].values() if until > now]


class Swarm:
    """Peers of one stage that announce themselves and read, every few seconds."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.listed: defaultdict[str, dict[str, tuple[PeerRecord, float]]] = defaultdict(dict)
        self.peers: dict[str, SplitKey] = {}
        self.num_read = 0
        self.is_gone = False

    def reader(self, peer_id: str) -> SplitKey:
        known: Any = lambda key: Known(self, key)  # noqa: E731
        return SplitKey(known, KEY, peer_id, self.clock)

    def join(self, names: Sequence[object]) -> list[str]:
        ids = [hashlib.sha1(str(name).encode()).hexdigest() for name in names]
        self.peers |= {peer_id: self.reader(peer_id) for peer_id in ids}
        return ids

    async def announce(self, peer_id: str) -> None:
        now = self.clock.time()
        record = PeerRecord(peer_id=peer_id, announced_at=now, stage=1, endpoint="192.0.2.1:1", state=PeerState.SERVING)
        for key in await self.peers[peer_id].places():
            assert takes(key, peer_id)
            self.listed[key][peer_id] = record, now + LIFETIME_SECONDS

    async def live(self, seconds: float) -> None:
        for _ in range(round(seconds / RENEW_SECONDS)):
            for peer_id in random.Random(0).sample(sorted(self.peers), len(self.peers)):
                await self.announce(peer_id)
            for peer in self.peers.values():
                await peer.sample(is_own=True)
            self.clock.advance(RENEW_SECONDS)


@pytest.fixture(scope="module")
def large() -> Swarm:
    """A stage of 200 peers that know each other. Tests only read there."""
    swarm = Swarm()
    swarm.join(range(200))
    asyncio.run(swarm.live(60))
    return swarm


def ids(records: Sequence[PeerRecord]) -> set[str]:
    return {record.peer_id for record in records}


async def test_a_small_stage_has_one_key_and_everybody_knows_everybody() -> None:
    swarm = Swarm()
    peers = swarm.join(range(GO_DOWN))
    await swarm.live(60)
    assert list(swarm.listed) == [KEY]
    sender = swarm.reader("12" * 20)
    assert ids(await sender.sample(is_own=False)) == set(peers) == ids(await swarm.peers[peers[0]].sample(is_own=True))


async def test_of_a_large_stage_each_reader_knows_the_same_few_and_all_together_know_all_equally_often(
    large: Swarm,
) -> None:
    swarm, peers = large, set(large.peers)
    assert ids(await swarm.reader("12" * 20).everyone()) == peers
    known = Counter[str]()
    for number in range(100):
        sender = swarm.reader(hashlib.sha1(b"sender %d" % number).hexdigest())
        swarm.num_read, sample = 0, ids(await sender.sample(is_own=False))
        assert LEAST_POINTS * 8 <= len(sample) <= LEAST_POINTS * SPLIT
        swarm.num_read = 0
        assert ids(await sender.sample(is_own=False)) == sample
        assert swarm.num_read <= LEAST_POINTS * SPLIT, "once it knows the way, it reads the lowest keys alone"
        known.update(sample)
    usual = sum(known.values()) / len(peers)
    assert set(known) == peers
    assert max(known.values()) < 3 * usual


async def test_a_sender_with_much_to_send_knows_more_and_goes_on_to_know_them(large: Swarm) -> None:
    swarm, peers = large, set(large.peers)
    sender = swarm.reader("12" * 20)
    few = ids(await sender.sample(is_own=False))
    many = ids(await sender.sample(is_own=False, under_way=1000))
    assert few < many
    assert len(many) > 0.9 * len(peers)
    assert ids(await sender.sample(is_own=False, under_way=3)) == many


async def test_a_member_knows_its_neighbours_and_who_may_lead_and_the_leader_knows_all(large: Swarm) -> None:
    swarm, peers = large, sorted(large.peers)
    for number, peer_id in enumerate(peers):
        sample = ids(await swarm.peers[peer_id].sample(is_own=True))
        if number < NUM_HEIRS:
            assert sample == set(peers)
        else:
            assert {*peers[:SPLIT], peer_id} <= sample
            assert len(sample) <= 2 * KEPT
    assert ids(await swarm.peers[peers[-1]].sample(is_own=True, leads=True)) == set(peers)


async def test_a_stage_that_grows_and_shrinks_is_never_out_of_sight() -> None:
    swarm = Swarm()
    sender = swarm.reader("12" * 20)
    for number in range(12):
        swarm.join(range(number * 20, number * 20 + 20))
        await swarm.live(5)
        assert len(await sender.sample(is_own=False)) >= 16
    await swarm.live(30)
    assert ids(await sender.everyone()) == set(swarm.peers)
    swarm.peers = {peer_id: swarm.peers[peer_id] for peer_id in random.Random(1).sample(sorted(swarm.peers), 20)}
    await swarm.live(30)
    for _ in range(40):
        assert len(await sender.sample(is_own=False)) >= 16
        await swarm.live(5)
    assert ids(await sender.sample(is_own=False)) == set(swarm.peers)
    assert [key for key, listed in swarm.listed.items() if Known(swarm, key).present()] == [KEY]


async def test_if_those_that_may_lead_die_at_once_others_take_their_place() -> None:
    swarm = Swarm()
    swarm.join(range(90))
    await swarm.live(60)
    for peer_id in sorted(swarm.peers)[: KEPT - SPLIT]:
        del swarm.peers[peer_id]
    await swarm.live(LIFETIME_SECONDS + UPPER_SECONDS)
    alive = sorted(swarm.peers)
    assert set(alive[:KEPT]) <= ids(Known(swarm, KEY).present())
    assert ids(await swarm.peers[alive[0]].sample(is_own=True)) == set(alive)


async def test_made_up_peers_hide_nobody_and_split_keys_on_their_own_ways_alone() -> None:
    swarm = Swarm()
    honest = set(swarm.join(range(40)))
    # These ids were sought out: all begin with the same sixteen bits, which are lower than any honest peer's.
    made_up = {f"{number:040x}" for number in range(500)}
    for bits in ("", *(bits_of("0" * 40)[:depth] for depth in range(1, 17))):
        key = f"{KEY}/{bits}" if bits else KEY
        for peer_id in made_up:
            record = PeerRecord(
                peer_id=peer_id, announced_at=1.0, stage=1, endpoint="192.0.2.1:1", state=PeerState.SERVING
            )
            swarm.listed[key][peer_id] = record, 1e9
    await swarm.live(60)
    assert honest | made_up == ids(await swarm.reader("12" * 20).everyone())
    for number in range(50):
        sender = swarm.reader(hashlib.sha1(b"sender %d" % number).hexdigest())
        sample = ids(await sender.sample(is_own=False))
        assert {peer_id for peer_id in honest if peer_id >= "4"} <= sample, "in the other quarters all are known"
    split = {key.partition("/")[2] for key in swarm.listed if len(swarm.listed[key]) > SPLIT}
    assert all(bits == "0" * len(bits) for bits in split)


async def test_while_the_dht_is_gone_a_peer_goes_on_announcing_itself_where_it_did() -> None:
    swarm = Swarm()
    peers = swarm.join(range(100))
    await swarm.live(60)
    before = await swarm.peers[peers[0]].places()
    swarm.is_gone = True
    swarm.clock.advance(UPPER_SECONDS + 1)
    assert await swarm.peers[peers[0]].places() == before != [KEY]
