"""swarm-meet: a first address, a node of the DHT and a meeting point, on one port and without torch."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from peers import meet
from peers.meet import MeetOptions, owners_of
from peers.reach.listen import Outside
from peers.shared import cli, option_types
from peers.shared.entrance import Entrance
from scripts.benches.shared.ports import free_ports
from swarm.credentials.identity import Identity
from swarm.credentials.token import Token
from swarm.dht import keys
from swarm.dht.lookup import PeerStore
from swarm.dht.node import DhtNode
from swarm.errors import SwarmError
from swarm.machine.clock import SystemClock
from swarm.rpc.channels import ChannelPool
from swarm.rpc.entry import Entry
from swarm.rpc.meeting.check import is_node
from swarm.rpc.meeting.dialler import Points
from swarm.rpc.meeting.waiting import Waiting
from swarm.types import Block, PeerId
from tests.support import locked
from tests.support.chain import eventually
from tests.support.memory_store import MemoryStore

CLOCK = SystemClock()
PROGRAM = """
import sys
from peers import meet
code = meet.main(sys.argv[1:])
heavy = {"torch", "hivemind.averaging", "hivemind.moe", "transformers"} & sys.modules.keys()
print("needs", sorted(heavy), "code", code)
"""


@pytest.mark.e2e
async def test_it_serves_grpc_and_the_dht_at_one_port_and_has_not_imported_torch(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    own = ["--port", str(port), "--announce", "127.0.0.1", "--identity", str(tmp_path / "meet.pem")]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, *own, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        said = [(await process.stdout.readline()).decode() for _ in range(3)]
        assert said[0] == f"Meeting point at 127.0.0.1:{port}, for the runs of whoever reaches it\n"
        entry = Entry.parse(said[1].split()[-3])
        entrance = Entrance(entries=(entry,), token=None, insecure=False)
        (address,) = await entrance.node_addresses(CLOCK)
        assert address.startswith(f"/ip4/127.0.0.1/tcp/{port}/p2p/")
        assert await is_node("127.0.0.1", port)
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = await process.communicate()
    assert rest == b"needs [] code 0\n"


class Node(MemoryStore):
    """A node of the DHT in memory."""

    port = 1

    def addresses(self) -> list[str]:
        """Do as DhtNode does."""
        return []


@asynccontextmanager
async def _serving(tokens: Sequence[Token]) -> AsyncIterator[Entry]:
    (port,) = free_ports(1)
    own = replace(locked.OPEN, authority=owners_of([*map(str, tokens)]))
    options = cli.parse(MeetOptions, prog="swarm-meet", argv=["--port", str(port), "--host", "127.0.0.1"])
    node = cast(DhtNode, Node(CLOCK))
    serving = asyncio.create_task(meet.serve(options, own, node, [Outside("127.0.0.1", port)]))
    try:
        entry = Entry.at(PeerId(own.peer_id), "127.0.0.1", port)
        await eventually(lambda: serving.done() or not _is_free(port))
        yield entry
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def _is_free(port: int) -> bool:
    try:
        option_types.require_free_port("--port", "127.0.0.1", port)
    except ValueError:
        return False
    return True


async def _reads(entry: Entry, own: Identity) -> bool:
    channels = ChannelPool(identity=own)
    store = PeerStore([entry], channels, own, insecure=False)
    try:
        return await store.get(keys.of_block("any.run", Block(0))) == {}
    except SwarmError:
        return False
    finally:
        await store.close()
        await channels.close()


async def test_locked_it_serves_the_members_of_several_owners_and_nobody_else() -> None:
    foreign = locked.issue(by=locked.STRANGER)
    async with _serving([locked.TRAINER_TOKEN, foreign]) as entry:
        assert await _reads(entry, locked.PEER)
        assert await _reads(entry, locked.FOREIGN)
        assert not await _reads(entry, locked.OPEN)
    async with _serving([foreign]) as entry:
        assert not await _reads(entry, locked.PEER)
        assert await _reads(entry, locked.FOREIGN)


@pytest.mark.parametrize("own", [locked.PEER, locked.OPEN], ids=["of a locked run", "of an open run"])
async def test_an_open_one_serves_every_run_and_a_member_of_a_locked_run_waits_there(own: Identity) -> None:
    async with _serving([]) as entry:
        assert await _reads(entry, own)
        points = Points(own, insecure=False)
        waiting = Waiting(own, points, CLOCK, server=("127.0.0.1", 1), candidates=lambda: [entry])
        task = asyncio.create_task(waiting.run())
        await eventually(lambda: waiting.endpoints == (f"tunnel:{entry}",))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_nothing_but_keys_of_runs_is_looked_up() -> None:
    async with _serving([]) as entry:
        channels = ChannelPool(identity=locked.OPEN)
        store = PeerStore([entry], channels, locked.OPEN, insecure=False)
        with pytest.raises(SwarmError, match="is no key of the run"):
            await store.get("something else")
        await store.close()
        await channels.close()
