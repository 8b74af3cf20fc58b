"""DHT nodes: real ones, with real p2pd processes."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from pydantic import BaseModel

from swarm.credentials import identity
from swarm.credentials.certificates import Role
from swarm.dht import keys, quota
from swarm.dht import node as dht_node
from swarm.dht.node import DhtNode
from swarm.dht.records import MAX_LIFETIME_SECONDS, seal
from swarm.errors import PeerUnavailable
from swarm.machine import patience
from swarm.machine.clock import SystemClock
from tests.support import locked
from tests.support.processes import is_running, wait_until_gone

OWNER, THIEF = identity.generate(), identity.generate()
KEYS = [
    "notes", "nothing", "forged.1", "forged.2", "forged.3", "prolonged", "ahead", "rubbish", "lies", "cached", "after",
    "and others can join there", "a client finds it", "own", "parted", "survives",
    "again", "whatever",
    *(f"restart {number}" for number in range(3)), *keys.of_run("run.0", 1),
]  # fmt: skip
NOBODY = "12D3KooWJGb1V4MhumFes4HqVJKRZrs8qZcyMBtgrNRXUpPo3sN1"

if TYPE_CHECKING:
    from tests.support.dht_stranger import Stranger

Start = Callable[..., DhtNode]


class Ahead(SystemClock):
    """A clock that is ahead."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


class Note(BaseModel):
    text: str = "hello"


def _sealed(key: str, expiration: float, signer: identity.Identity = OWNER) -> bytes:
    return seal(signer, key, Note(), expiration)


def _stranger(node: DhtNode, *, is_client: bool = True) -> "Stranger":
    from tests.support.dht_stranger import Stranger

    return Stranger(node.addresses()[0], is_client=is_client)


def _send(stranger: "Stranger", to: DhtNode, key: str, signers: Sequence[identity.Identity], seconds: float) -> int:
    """Have a stranger store well-made records at a node; returns how many the node took."""
    expiration = time.time() + seconds
    records = [(signer.peer_id, _sealed(key, expiration, signer)) for signer in signers]
    return sum(stranger.send(to.addresses()[0], key, records, expiration))


def _p2pd_of(node: DhtNode) -> psutil.Process:
    port = node.addresses()[0].split("/")[4]
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.ZombieProcess):
            if any(argument.endswith(f"/tcp/{port}") for argument in child.cmdline()):
                return child
    raise AssertionError("p2pd does not run")


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """A function that starts nodes on loopback, which are ended after the test."""
    nodes: list[DhtNode] = []

    def start_one(initial_peers: list[str] | None = None, **options: object) -> DhtNode:
        arguments = {"clock": SystemClock(), "host": "127.0.0.1", "initial_peers": initial_peers or [], **options}
        nodes.append(dht_node.start(**arguments))  # type: ignore[arg-type]  # Only what the tests pass on.
        nodes[-1].belong_to(KEYS, None)
        return nodes[-1]

    yield start_one
    for node in nodes:
        node.shutdown()


@pytest.fixture(scope="module")
def first(start: Start) -> DhtNode:
    return start()


@pytest.fixture(scope="module")
def second(start: Start, first: DhtNode) -> DhtNode:
    return start(first.addresses())


@pytest.fixture(scope="module")
def client(start: Start, first: DhtNode) -> DhtNode:
    return start(first.addresses(), client_mode=True)


@pytest.fixture(scope="module")
def careless(first: DhtNode) -> Iterator["Stranger"]:
    """Let nodes send any record."""
    with _stranger(first) as stranger:
        yield stranger


async def test_what_one_stores_all_can_read(first: DhtNode, second: DhtNode, client: DhtNode) -> None:
    expiration = time.time() + 30
    value = _sealed("notes", expiration)
    by_client = _sealed("notes", expiration, THIEF)
    assert await second.store("notes", OWNER.peer_id, value, expiration)
    assert await client.store("notes", THIEF.peer_id, by_client, expiration)
    for node in (first, second, client):
        found = await node.get("notes")
        assert found == {OWNER.peer_id: (value, expiration), THIEF.peer_id: (by_client, expiration)}
        for _ in range(3):
            assert await node.get("notes", partly=True) == found
    assert await first.get("nothing") == await first.get("nothing", partly=True) == {}


async def test_a_client_has_no_address(first: DhtNode, client: DhtNode) -> None:
    assert client.addresses() == []
    assert [address.startswith("/ip4/127.0.0.1/tcp/") for address in first.addresses()] == [True]


@pytest.mark.parametrize(
    ("key", "subkey", "signed_key", "lifetime_seconds"),
    [
        ("forged.1", THIEF.peer_id, "forged.1", 30),
        ("forged.2", OWNER.peer_id, "another key", 30),
        ("forged.3", OWNER.peer_id, "forged.3", MAX_LIFETIME_SECONDS + 60),
    ],
    ids=["another's subkey", "for another key", "for too long"],
)
async def test_storage_nodes_refuse_what_its_owner_did_not_seal(
    first: DhtNode,
    second: DhtNode,
    careless: "Stranger",
    key: str,
    subkey: str,
    signed_key: str,
    lifetime_seconds: float,
) -> None:
    expiration = time.time() + lifetime_seconds
    value = _sealed(signed_key, expiration)
    assert not careless.store(key, subkey, value, expiration)
    assert not await first.store(key, subkey, value, expiration)
    assert await second.get(key) == {}


async def test_storage_nodes_refuse_a_longer_life(first: DhtNode, careless: "Stranger") -> None:
    expiration = time.time() + 30
    value = _sealed("prolonged", expiration)
    assert not careless.store("prolonged", OWNER.peer_id, value, expiration + 60)
    assert await first.get("prolonged") == {}


async def test_what_a_node_took_while_its_clock_was_ahead_is_in_nobodys_way(start: Start) -> None:
    clock = Ahead()
    node = start(clock=clock)
    reader = start(node.addresses(), client_mode=True)
    clock.ahead = 1000.0
    expiration = clock.time() + 20
    assert await node.store("ahead", OWNER.peer_id, _sealed("ahead", expiration), expiration)
    clock.ahead = 0.0
    assert await reader.get("ahead") == {}
    for seconds in (20, 21):
        expiration = time.time() + seconds
        value = _sealed("ahead", expiration)
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
        who.peer_id: (_sealed(key, expiration, who), expiration)
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
    honest = _sealed("lies", expiration)
    with _stranger(first, is_client=False) as liar:
        liar.keep("lies", THIEF.peer_id, b"forged", expiration + 1e6)
        assert await first.store("lies", OWNER.peer_id, honest, expiration)
        assert await first.get("lies") == {OWNER.peer_id: (honest, expiration)}


async def test_keys_of_other_runs_are_not_stored(start: Start) -> None:
    """A trainer's token may announce trainers, and in an open run any peer may, but only of this run."""
    for authority, signer in ((locked.OWNER.authority, locked.TRAINER), (None, OWNER)):
        node = start()
        node.belong_to(keys.of_run("run.0", 1), authority)
        with _stranger(node) as intruder:
            for number in range(4):
                made_up = f"made up {number}.trainers", f"made up {number}.stage.0"
                for key in (*made_up, keys.of_stage("run.0", number + 1)):
                    assert _send(intruder, node, key, [signer], 30) == 0
                    assert intruder.ask(node.addresses()[0], key) == {}
            assert _send(intruder, node, keys.of_trainers("run.0"), [signer], 30) == 1
            assert list(intruder.ask(node.addresses()[0], keys.of_trainers("run.0"))) == [signer.peer_id]
        node.shutdown()


async def test_a_node_that_knows_no_run_yet_stores_what_runs_there_are_and_nothing_else(start: Start) -> None:
    node = start()
    node.belong_to([keys.RUNS], None)
    with _stranger(node) as intruder:
        assert _send(intruder, node, keys.of_stage("run.0", 0), [OWNER], 30) == 0
        assert _send(intruder, node, keys.RUNS, [OWNER], 30) == 1
    node.shutdown()


async def test_a_key_has_so_many_records_and_those_that_are_there_stay(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "MAX_KEY_RECORDS", 30)
    node, key = start(), keys.of_trainers("run.0")
    with _stranger(node) as intruder:
        assert _send(intruder, node, key, [OWNER], 20) == 1
        assert _send(intruder, node, key, [identity.generate() for _ in range(60)], 30) == 29
        assert len(intruder.ask(node.addresses()[0], key)) == 30
        assert _send(intruder, node, key, [OWNER], 40) == 1, "it was there before"
    reader = start(node.addresses(), client_mode=True)
    assert len(await reader.get(key)) == 30
    for one in (reader, node):
        one.shutdown()


async def test_all_keys_of_one_token_have_one_share(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "MAX_OWNER_RECORDS", 10)
    node, key = start(), keys.of_trainers("run.0")
    node.belong_to(KEYS, locked.OWNER.authority)
    token = locked.issue(Role.TRAINER)
    with _stranger(node) as intruder:
        assert _send(intruder, node, key, [token.admit(identity.generate()) for _ in range(25)], 30) == 10
        assert _send(intruder, node, key, [locked.TRAINER, locked.PEER], 30) == 2
    node.shutdown()


async def test_an_old_record_sent_again_does_not_shorten_the_life_of_a_new_one(start: Start) -> None:
    node, key = start(), keys.of_trainers("run.0")
    old = time.time() + 1.0
    sealed = _sealed(key, old)
    with _stranger(node) as intruder:
        assert _send(intruder, node, key, [OWNER], 30) == 1
        assert not await node.store(key, OWNER.peer_id, sealed, old)
        await asyncio.sleep(1.1)
        assert list(intruder.ask(node.addresses()[0], key)) == [OWNER.peer_id]
    node.shutdown()


async def test_a_node_cannot_make_itself_many(start: Start) -> None:
    node = start()
    [address] = node.addresses()
    with _stranger(node, is_client=False) as intruder, _stranger(node) as observer:
        for number in range(10):
            intruder.greet_as(f"made up {number}", address)
        assert observer.neighbours(address) == [intruder.dht.libp2p_id]
    node.shutdown()


async def test_what_a_stranger_has_a_node_cache_hides_nothing(start: Start) -> None:
    """The cached record is valid, and expires later than those that are stored under its key."""
    node = start()
    reader = start(node.addresses(), client_mode=True)
    expiration = time.time() + 30
    kept, cached = _sealed("cached", expiration), _sealed("cached", expiration + 30, THIEF)
    assert await node.store("cached", OWNER.peer_id, kept, expiration)
    with _stranger(node) as stranger:
        records = [(THIEF.peer_id, cached)]
        assert stranger.send(node.addresses()[0], "cached", records, expiration + 30, in_cache=True) == [False]
    assert await node.get("cached") == await reader.get("cached") == {OWNER.peer_id: (kept, expiration)}
    for one in (reader, node):
        one.shutdown()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("/ip4/127.0.0.1/tcp/1/p2p/" + NOBODY, "check the address"),
        ("{first}/p2p/" + NOBODY, "another peer answers there"),
    ],
)
def test_who_cannot_join_is_told_why(
    start: Start, first: DhtNode, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, address: str,
    reason: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(patience, "JOIN_SECONDS", 0.3)
    address = address.format(first=first.addresses()[0].split("/p2p/")[0])
    with pytest.raises(PeerUnavailable, match=rf"^cannot join the DHT at {address}: {reason}") as caught:
        start([address])
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_one_address_of_a_node_suffices(start: Start, first: DhtNode) -> None:
    """A record names several addresses, and a machine that has only IPv6 has no way to those of IPv4."""
    [address] = first.addresses()
    node = start([f"/ip4/127.0.0.1/tcp/1/p2p/{address.rpartition('/')[2]}", address], client_mode=True)
    node.shutdown()


def test_one_node_of_several_suffices(start: Start, first: DhtNode) -> None:
    node = start([f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}", *first.addresses()], client_mode=True)
    node.shutdown()


def test_those_that_start_at_the_same_moment_wait_for_each_other(start: Start, tmp_path: Path) -> None:
    """Each node is told all addresses, its own included. The node that begins the DHT starts last."""
    options: list[dict[str, Any]] = [{"identity_path": tmp_path / f"{number}.p2p"} for number in range(3)]
    known = list[str]()
    for number, node in enumerate([start(**own) for own in options]):
        known += node.addresses()
        options[number]["port"] = int(node.addresses()[0].split("/")[4])
        node.shutdown()
    with ThreadPoolExecutor() as pool:
        joiners = [pool.submit(start, known, **own) for own in options[1:]]
        time.sleep(0.5)
        first = start(**options[0])
        expiration = time.time() + 30
        value = _sealed("notes", expiration)
        assert asyncio.run(first.store("notes", OWNER.peer_id, value, expiration))
        for joiner in joiners:
            node = joiner.result(timeout=30)
            asyncio.run(_until_found(node, "notes"))
            node.shutdown()
    first.shutdown()


def test_clients_cannot_be_joined(start: Start, first: DhtNode, careless: "Stranger") -> None:
    nobody_listens = first.addresses()[0].split("/p2p/")[0] + f"/p2p/{careless.dht.libp2p_id}"
    with pytest.raises(PeerUnavailable, match="another peer answers there"):
        start([nobody_listens])


def test_a_port_in_use_is_refused(start: Start, first: DhtNode) -> None:
    port = int(first.addresses()[0].split("/")[4])
    with pytest.raises(ValueError, match=f"^the DHT cannot listen on 127.0.0.1 port {port}: "):
        start(port=port)


def test_an_address_that_is_none_is_refused(start: Start) -> None:
    with pytest.raises(ValueError, match="is no address of a DHT node"):
        start(["127.0.0.1:4001"])


def test_a_damaged_key_is_one_line(start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "libp2p.key"
    key.write_bytes(b"no key")
    with pytest.raises(OSError, match=r"^the DHT's process, p2pd, did not start: .+$"):
        start(identity_path=key)
    assert capfd.readouterr() == ("", "")


def test_slowness_is_one_line(start: Start) -> None:
    with pytest.raises(PeerUnavailable, match=r"^the DHT node was not ready within 0 s"):
        start(timeout_seconds=0.01)


def test_a_restart_keeps_the_address(start: Start, tmp_path: Path) -> None:
    options = {"identity_path": tmp_path / "state" / "libp2p.key", "announce": [("peer.example", 0)]}
    node = start(**options)
    node.shutdown()
    again = start(**options, port=int(node.addresses()[0].split("/")[4]))
    assert again.addresses() == node.addresses()
    assert node.addresses()[0].startswith("/dns/peer.example/tcp/")
    again.shutdown()


async def test_a_node_that_has_become_a_client_can_become_the_node_that_it_was(start: Start, tmp_path: Path) -> None:
    witness = start()
    node = start(witness.addresses(), identity_path=tmp_path / "libp2p.key")
    before = node.addresses()
    assert before[0].split("/")[4] == str(node.port)
    await node.become(client_mode=True)
    assert node.addresses() == []
    await node.become(client_mode=False)
    assert node.addresses() == before
    # Another node joins there.
    for one in (start(before), node, witness):
        one.shutdown()


def test_several_addresses_are_announced_in_the_order_in_which_they_are_given(start: Start) -> None:
    hosts = ["198.18.0.9", "10.9.0.7", "127.0.0.1"]
    assert [address.split("/")[2] for address in start(announce=[(host, 0) for host in hosts]).addresses()] == hosts


async def test_a_restarted_node_is_one_node_to_others(start: Start, tmp_path: Path) -> None:
    """As two nodes it would be sent every record twice, and would refuse the second copy."""
    witness = start()
    with _stranger(witness) as observer:
        for number in range(3):
            node = start(witness.addresses(), identity_path=tmp_path / "libp2p.key")
            key, expiration = f"restart {number}", time.time() + 30
            assert await witness.store(key, OWNER.peer_id, _sealed(key, expiration), expiration)
            [known] = observer.neighbours(witness.addresses()[0])
            assert node.addresses()[0].endswith(f"/p2p/{known}")
            node.shutdown()
    witness.shutdown()


async def test_after_the_end_calls_fail_at_once(start: Start, first: DhtNode) -> None:
    node = start(first.addresses())
    node.shutdown()
    node.shutdown()
    node.remember(["/x"])
    with pytest.raises(PeerUnavailable, match="has left the DHT"):
        await node.get("notes")


async def test_without_p2pd_calls_fail_at_once(start: Start, first: DhtNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_node, "RESTART_SECONDS", 60.0)
    node = start(first.addresses())
    _p2pd_of(node).kill()
    await asyncio.sleep(0.2)
    begin = time.monotonic()
    with pytest.raises(PeerUnavailable, match="p2pd, has died"):
        await node.get("notes")
    assert time.monotonic() - begin < dht_node.CALL_SECONDS / 2
    node.shutdown()


async def test_p2pd_is_brought_back_with_its_address(
    start: Start, first: DhtNode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="swarm.dht")
    node = start(first.addresses(), identity_path=tmp_path / "peer.p2p")
    addresses = node.addresses()
    for _ in range(2):
        killed = _p2pd_of(node)
        killed.kill()
        value, expiration = await _store_once_it_is_back(node, "after")
        assert _p2pd_of(node).pid != killed.pid
        assert node.addresses() == addresses
        assert await first.get("after") == {OWNER.peer_id: (value, expiration)}, "it is in the same DHT again"
        late = start(node.addresses())
        assert await late.get("after") == {OWNER.peer_id: (value, expiration)}, "and others can join there"
    said = [record.getMessage() for record in caplog.records if "p2pd" in record.getMessage()]
    assert [line.split(",")[1].split(":")[0].strip() for line in said] == ["p2pd", "and this peer in the DHT"] * 2
    node.shutdown()


async def _store_once_it_is_back(node: DhtNode, key: str) -> tuple[bytes, float]:
    async with asyncio.timeout(60.0):
        while True:
            expiration = time.time() + 30
            value = _sealed(key, expiration)
            try:
                if await node.store(key, OWNER.peer_id, value, expiration):
                    return value, expiration
            except PeerUnavailable:
                await asyncio.sleep(0.1)


async def test_p2pd_that_cannot_start_is_tried_again_and_the_end_does_not_wait(
    start: Start, first: DhtNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht_node, "RESTART_SECONDS", 0.05)
    node = start(first.addresses(), identity_path=tmp_path / "peer.p2p")
    key = tmp_path / "peer.p2p"
    away = key.rename(tmp_path / "away")
    _p2pd_of(node).kill()
    await asyncio.sleep(2.0)
    with pytest.raises(PeerUnavailable, match="has died, and is being started again"):
        await node.get("notes")
    away.rename(key)
    await _store_once_it_is_back(node, "again")
    key.unlink()
    _p2pd_of(node).kill()
    await asyncio.sleep(0.5)
    begin = time.monotonic()
    node.shutdown()
    assert time.monotonic() - begin < 5.0


async def test_p2pd_is_brought_back_whatever_goes_wrong_at_first(
    start: Start, first: DhtNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht_node, "RESTART_SECONDS", 0.05)
    from swarm.dht import kademlia

    launch, stop = kademlia.launch, kademlia.Kademlia.stop
    faults: Iterator[Exception | None] = iter([None, asyncio.IncompleteReadError(b"", 1), RuntimeError("odd")])

    async def dies_meanwhile(*arguments: Any, **options: Any) -> Any:
        if fault := next(faults, None):
            raise fault
        return await launch(*arguments, **options)

    async def fails(dht: kademlia.Kademlia) -> None:
        await stop(dht)
        raise ConnectionResetError

    monkeypatch.setattr(kademlia, "launch", dies_meanwhile)
    node = start(first.addresses(), identity_path=tmp_path / "peer.p2p")
    monkeypatch.setattr(kademlia.Kademlia, "stop", fails)
    _p2pd_of(node).kill()
    await _store_once_it_is_back(node, "whatever")
    assert next(faults, None) is None
    monkeypatch.setattr(kademlia.Kademlia, "stop", stop)
    node.shutdown()


def _thread_states(pid: int) -> list[str]:
    return [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
async def test_a_call_has_a_deadline(start: Start, first: DhtNode) -> None:
    node = start(first.addresses())
    p2pd = _p2pd_of(node)
    p2pd.suspend()
    # The threads of p2pd stop one by one, when each is scheduled.
    while any(status != "T" for status in _thread_states(p2pd.pid)):  # noqa: ASYNC110 - nothing tells when
        await asyncio.sleep(0.01)
    with pytest.raises(PeerUnavailable, match="did not answer within 0 s"):
        await node.get("notes", timeout_seconds=0.3)
    node.shutdown()


async def test_a_client_without_neighbours_knows_nothing(start: Start) -> None:
    """A client must not take silence for an empty DHT."""
    server = start()
    client = start(server.addresses(), client_mode=True)
    assert await client.get("notes") == {}
    server.shutdown()
    with pytest.raises(PeerUnavailable, match="no node of the DHT answers"):
        await client.get("notes")
    client.shutdown()


async def test_parted_nodes_find_each_other_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_node, "RECONNECT_SECONDS", 0.1)
    one, two = start(), start()
    one.remember(["no address"])
    one.remember([f"/ip4/127.0.0.1/tcp/1/p2p/{two.addresses()[0].rpartition('/')[2]}", *two.addresses()])
    expiration = time.time() + 30
    value = _sealed("parted", expiration)
    assert await two.store("parted", OWNER.peer_id, value, expiration)
    found: dict[str, tuple[bytes, float]] = {}
    async with asyncio.timeout(5.0):
        while not found:
            with contextlib.suppress(PeerUnavailable):
                found = await one.get("parted")
            await asyncio.sleep(0.1)
    for node in (one, two):
        node.shutdown()


async def test_reading_partly_survives_the_node_that_was_asked(start: Start, first: DhtNode, second: DhtNode) -> None:
    third = start(first.addresses())
    reader = start(first.addresses(), client_mode=True)
    expiration = time.time() + 30
    value = _sealed("survives", expiration)
    assert await reader.store("survives", OWNER.peer_id, value, expiration)
    assert await reader.get("survives", partly=True) == {OWNER.peer_id: (value, expiration)}
    third.shutdown()
    for _ in range(6):
        assert await reader.get("survives", partly=True) == {OWNER.peer_id: (value, expiration)}
    reader.shutdown()


async def _until_found(node: DhtNode, key: str) -> None:
    """Read until there is a record."""
    async with asyncio.timeout(20.0):
        found: object = None
        while not found:
            with contextlib.suppress(PeerUnavailable):
                found = await node.get(key)


async def _until_alone(node: DhtNode) -> None:
    """Read until the node says that no other node answers."""
    async with asyncio.timeout(30.0):
        with contextlib.suppress(PeerUnavailable):
            while True:
                await node.get("own")
    with pytest.raises(PeerUnavailable, match="no other node of the DHT answers"):
        await node.get("own")


async def _announce(node: DhtNode, lifetime_seconds: float) -> dict[str, tuple[bytes, float]]:
    expiration = time.time() + lifetime_seconds
    value = _sealed("own", expiration)
    assert await node.store("own", OWNER.peer_id, value, expiration)
    return {OWNER.peer_id: (value, expiration)}


async def test_a_node_without_neighbours_does_not_take_its_own_records_for_all(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That changes once the others have been gone for so long that it must be the only one left."""
    left = start()
    left.remember(left.addresses())
    own = await _announce(left, 40.0)
    assert await left.get("own") == own, "it is the first, and remembers only itself"
    client, other = start(left.addresses(), client_mode=True), start(left.addresses())
    left.remember(other.addresses())
    assert await left.get("own") == own
    other.shutdown()
    await _until_alone(left)
    own = await _announce(left, 50.0)
    assert await client.get("own") == own, "a client finds it"
    newcomer = start(left.addresses())
    assert await newcomer.get("own") == await left.get("own") == own
    newcomer.shutdown()
    await _until_alone(left)
    monkeypatch.setattr(dht_node, "ALONE_SECONDS", 0.5)
    await asyncio.sleep(0.6)
    assert await left.get("own") == own
    for node in (client, left):
        node.shutdown()


async def test_a_node_that_is_cut_off_does_not_take_its_own_records_for_an_answer_and_is_soon_back(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must notice that although it knows of others and has asked them a moment ago."""
    monkeypatch.setattr(dht_node, "LONELY_SECONDS", 0.1)
    left = start()
    others = [start(left.addresses()) for _ in range(2)]
    for other in others:
        left.remember(other.addresses())
    own = await _announce(left, 40.0)
    assert await left.get("own", partly=True) == own
    for other in others:
        _p2pd_of(other).suspend()
    with contextlib.suppress(PeerUnavailable):
        await left.get("own")
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        with pytest.raises(PeerUnavailable):
            await left.get("own", partly=True)
    for other in others:
        _p2pd_of(other).resume()
    async with asyncio.timeout(4.0):
        while True:
            with contextlib.suppress(PeerUnavailable):
                if await left.get("own", partly=True) == own:
                    break
            await asyncio.sleep(0.1)
    for node in (left, *others):
        node.shutdown()


PROGRAM = """
import signal, sys, time
import psutil
# Ignored by whatever a shell runs in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
from swarm.machine.clock import SystemClock
from swarm.dht import node
running = node.start(clock=SystemClock(), host="127.0.0.1", initial_peers=sys.argv[1:])
try:
    [p2pd] = psutil.Process().children()
    print(p2pd.pid, flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.2)
    print("p2pd is", "alive" if p2pd.status() != psutil.STATUS_ZOMBIE else "dead", flush=True)
    running.shutdown()
"""


def _program(first: DhtNode) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *first.addresses()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_kill_9_leaves_nothing(first: DhtNode) -> None:
    with _program(first) as program:
        assert program.stdout is not None
        p2pd = int(program.stdout.readline())
        assert is_running(p2pd)
        os.kill(program.pid, signal.SIGKILL)
        wait_until_gone(p2pd)
        assert program.stdout.read() == ""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_ctrl_c_spares_p2pd_until_the_peer_has_said_goodbye(first: DhtNode) -> None:
    with _program(first) as program:
        assert program.stdout is not None
        p2pd = int(program.stdout.readline())
        os.killpg(program.pid, signal.SIGINT)
        assert program.stdout.read() == "p2pd is alive\n"
        assert program.wait(5) == 0
        assert not is_running(p2pd)
