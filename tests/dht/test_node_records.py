"""A DHT node stores the records that it may, and no others. The nodes are real, with real p2pd processes."""

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from swarm.credentials import identity
from swarm.credentials.authority import Authority
from swarm.credentials.rights import Role
from swarm.dht import keys, known_records
from swarm.dht.node import DhtNode
from swarm.dht.records import MAX_LIFETIME_SECONDS
from swarm.machine.clock import SystemClock
from swarm.types import Block
from tests.dht.nodes import KEYS, OWNER, THIEF, Start, sealed_note, send, stranger_at
from tests.support import locked

if TYPE_CHECKING:
    from tests.support.dht_stranger import Stranger


class Ahead(SystemClock):
    """A clock that is ahead."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


@pytest.mark.parametrize(
    ("key", "subkey", "signed_key", "lifetime_seconds"),
    [
        ("forged.1", THIEF.peer_id, "forged.1", 30),
        ("forged.3", OWNER.peer_id, "forged.3", MAX_LIFETIME_SECONDS + 60),
    ],
    ids=["another's subkey", "for too long"],
)
async def test_storage_nodes_refuse_what_its_owner_did_not_seal(
    first: DhtNode, second: DhtNode, careless: "Stranger", key: str, subkey: str, signed_key: str,
    lifetime_seconds: float,
) -> None:  # fmt: skip
    expiration = time.time() + lifetime_seconds
    value = sealed_note(signed_key, expiration)
    assert not careless.store(key, subkey, value, expiration)
    assert not await first.store(key, subkey, value, expiration)
    assert await second.get(key) == {}


async def test_what_a_node_took_while_its_clock_was_ahead_is_in_nobodys_way(start: Start) -> None:
    clock = Ahead()
    node = start(clock=clock)
    reader = start(node.addresses(), client_mode=True)
    clock.ahead = 1000.0
    expiration = clock.time() + 20
    assert await node.store("ahead", OWNER.peer_id, sealed_note("ahead", expiration), expiration)
    clock.ahead = 0.0
    assert await reader.get("ahead") == {}
    for seconds in (20, 21):
        expiration = time.time() + seconds
        value = sealed_note("ahead", expiration)
        assert await node.store("ahead", OWNER.peer_id, value, expiration)
        assert await node.get("ahead") == await reader.get("ahead") == {OWNER.peer_id: (value, expiration)}
    for one in (reader, node):
        one.shutdown()


async def test_a_locked_node_stores_and_believes_members_alone(start: Start) -> None:
    open_node = start()
    node = start(open_node.addresses())
    node.belong_to(KEYS, locked.OWNER.authority)
    expiration = time.time() + 30
    key = "run.0.stage.0"
    values = {
        who.peer_id: (sealed_note(key, expiration, who), expiration)
        for who in (locked.PEER, locked.TRAINER, locked.EXPIRED, locked.FOREIGN, locked.OPEN)
    }
    # The open node is the stranger's: it keeps everything, and tells the other node all that it has.
    for peer_id, (value, _) in values.items():
        await open_node.store(key, peer_id, value, expiration)
    assert await open_node.get(key) == values
    assert await node.get(key) == {locked.PEER.peer_id: values[locked.PEER.peer_id]}
    for node_ in (open_node, node):
        node_.shutdown()


@pytest.mark.parametrize("rubbish", [b"", b"unsigned", b"x" * 300, b"\xc7\xff" * 200])
async def test_storage_nodes_refuse_rubbish(first: DhtNode, careless: "Stranger", rubbish: bytes) -> None:
    expiration = time.time() + 30
    assert not careless.store("rubbish", OWNER.peer_id, rubbish, expiration)
    assert not careless.store_bare("rubbish", rubbish, expiration)
    assert await first.get("rubbish") == {}


async def test_a_liar_deceives_no_reader(first: DhtNode) -> None:
    """It cannot hide what honest nodes know, either."""
    expiration = time.time() + 30
    honest = sealed_note("lies", expiration)
    with stranger_at(first, is_client=False) as liar:
        liar.keep("lies", THIEF.peer_id, b"forged", expiration + 1e6)
        assert await first.store("lies", OWNER.peer_id, honest, expiration)
        assert await first.get("lies") == {OWNER.peer_id: (honest, expiration)}


async def test_keys_of_other_runs_are_not_stored(start: Start) -> None:
    """A trainer's token may announce trainers, and in an open run any peer may, but only of this run."""
    for authority, signer in ((locked.OWNER.authority, locked.TRAINER), (None, OWNER)):
        node = start()
        node.belong_to(keys.of_run("run.0", [Block(0)]), authority)
        with stranger_at(node) as intruder:
            for number in range(4):
                made_up = f"made up {number}.trainers", f"made up {number}.stage.0"
                for key in (*made_up, keys.of_block("run.0", Block(number + 1))):
                    assert send(intruder, node, key, [signer], 30) == 0
                    assert intruder.ask(node.addresses()[0], key) == {}
            assert send(intruder, node, keys.of_trainers("run.0"), [signer], 30) == 1
            assert list(intruder.ask(node.addresses()[0], keys.of_trainers("run.0"))) == [signer.peer_id]
        node.shutdown()


async def test_a_key_has_so_many_records_and_those_that_are_there_stay(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_records, "MAX_KEY_RECORDS", 30)
    node, key = start(), keys.of_trainers("run.0")
    with stranger_at(node) as intruder:
        assert send(intruder, node, key, [OWNER], 20) == 1
        assert send(intruder, node, key, [identity.generate() for _ in range(60)], 30) == 29
        assert len(intruder.ask(node.addresses()[0], key)) == 30
        assert send(intruder, node, key, [OWNER], 40) == 1, "it was there before"
    reader = start(node.addresses(), client_mode=True)
    assert len(await reader.get(key)) == 30
    for one in (reader, node):
        one.shutdown()


async def test_all_keys_of_one_token_have_one_share(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_records, "MAX_OWNER_RECORDS", 10)
    node, key = start(), keys.of_trainers("run.0")
    node.belong_to(KEYS, locked.OWNER.authority)
    token = locked.issue(Role.TRAINER)
    with stranger_at(node) as intruder:
        assert send(intruder, node, key, [token.admit(identity.generate()) for _ in range(25)], 30) == 10
        assert send(intruder, node, key, [locked.TRAINER, locked.PEER], 30) == 2
    node.shutdown()


async def test_an_old_record_sent_again_does_not_shorten_the_life_of_a_new_one(start: Start) -> None:
    node, key = start(), keys.of_trainers("run.0")
    old = time.time() + 1.0
    sealed = sealed_note(key, old)
    with stranger_at(node) as intruder:
        assert send(intruder, node, key, [OWNER], 30) == 1
        assert not await node.store(key, OWNER.peer_id, sealed, old)
        await asyncio.sleep(1.1)
        assert list(intruder.ask(node.addresses()[0], key)) == [OWNER.peer_id]
    node.shutdown()


async def test_what_a_stranger_has_a_node_cache_hides_nothing(start: Start) -> None:
    """The cached record is valid, and expires later than those that are stored under its key."""
    node = start()
    reader = start(node.addresses(), client_mode=True)
    expiration = time.time() + 30
    kept, cached = sealed_note("cached", expiration), sealed_note("cached", expiration + 30, THIEF)
    assert await node.store("cached", OWNER.peer_id, kept, expiration)
    with stranger_at(node) as stranger:
        records = [(THIEF.peer_id, cached)]
        assert stranger.send(node.addresses()[0], "cached", records, expiration + 30, in_cache=True) == [False]
    assert await node.get("cached") == await reader.get("cached") == {OWNER.peer_id: (kept, expiration)}
    for one in (reader, node):
        one.shutdown()


@pytest.mark.parametrize("authority", [None, locked.OWNER.authority], ids=["of everybody", "of one owner"])
async def test_a_node_of_all_runs_stores_what_belongs_to_any_run_and_nothing_else(
    start: Start, authority: Authority | None
) -> None:
    node = start()
    node.belong_to(None, authority)
    expiration = time.time() + 30
    for key, signer in ((keys.of_block("a.1", Block(0, 2)), locked.PEER), (keys.of_claims("b.2"), locked.OTHER_PEER)):
        assert await node.store(key, signer.peer_id, sealed_note(key, expiration, signer), expiration)
    stranger = locked.OPEN
    key = keys.of_block("c.3", Block(1))
    took = await node.store(key, stranger.peer_id, sealed_note(key, expiration, stranger), expiration)
    assert took is (authority is None)
    for key in ("notes", ".stage.1", "a.1.stage.x", "a.1.stage.1.x"):
        assert not await node.store(key, locked.PEER.peer_id, sealed_note(key, expiration, locked.PEER), expiration)
