"""Whether another process serves under a peer's identity: real servers, that answer or do not."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from peers.shared.network import Membership
from peers.stage_peer.incarnation import LOOK_SECONDS, Incarnation, Rivals
from swarm.config import RunConfig, StagesConfig
from swarm.credentials.identity import generate
from swarm.errors import Fatal
from swarm.machine.clock import SystemClock
from swarm.rpc import tls
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceServicer, add_StageServiceServicer_to_server
from swarm.types import Block, PeerRecord, PeerState
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore

CONFIG = RunConfig(stages=StagesConfig(num_stages=2))
ME, OTHER = generate(), generate()
OWN = Incarnation(nonce="aa" * 8, started_at=2000.0)
ELDER = Incarnation(nonce="bb" * 8, started_at=1000.0)
YOUNGER = Incarnation(nonce="cc" * 8, started_at=3000.0)
NOBODY = "127.0.0.1:1"


class Host(StageServiceServicer):
    """A process that serves under some identity, and tells what it knows of rivals."""

    Train: Any = None
    Evaluate: Any = None
    Hold: Any = None
    Show: Any = None
    SpotCheck: Any = None

    def __init__(self, peer_id: str, stage: int, rivals: Rivals | None = None) -> None:
        self.endpoint = ""
        self.num_asked = 0
        self.rivals = rivals
        self.made_up: pb.Incarnation | None = None
        self._peer_id = peer_id
        self._stage = stage

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        self.num_asked += 1
        rival = self.made_up
        if self.rivals is not None and request.HasField("caller"):
            rival = await self.rivals.of(request.caller)
        return pb.DescribeReply(peer_id=self._peer_id, run_id=CONFIG.run_id, stage=self._stage, rival=rival)


@asynccontextmanager
async def serving(host: Host, identity: Any) -> AsyncIterator[Host]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_StageServiceServicer_to_server(host, server)
    host.endpoint = f"127.0.0.1:{bind_server(server, '127.0.0.1', 0, tls.server_credentials(identity))}"
    await server.start()
    try:
        yield host
    finally:
        await server.stop(None)


def record(incarnation: Incarnation, endpoint: str, *, who: Any = ME, stage: int = 1) -> PeerRecord:
    return PeerRecord(
        peer_id=who.peer_id, announced_at=0.0, stage=stage, endpoint=endpoint, certificate_pem=who.certificate_pem,
        state=PeerState.SERVING, nonce=incarnation.nonce, started_at=incarnation.started_at,
    )  # fmt: skip


@asynccontextmanager
async def rivals_of(
    *records: PeerRecord, own: Incarnation = OWN, who: Any = ME, clock: Any = None, host: Host | None = None
) -> AsyncIterator[Rivals]:
    member = Membership.enter(CONFIG, MemoryStore(SystemClock()), who, clock or SystemClock(), insecure=False)
    for one in records:
        member.known.records[Block(one.stage)] = [*member.known.peers(Block(one.stage)), one]
    try:
        yield Rivals(member, own=dataclasses.replace(own), endpoint=lambda: host.endpoint if host is not None else "")
    finally:
        await member.channels.close()


@asynccontextmanager
async def another(incarnation: Incarnation) -> AsyncIterator[Host]:
    host = Host(ME.peer_id, 1)
    async with serving(host, ME), rivals_of(own=incarnation, host=host) as host.rivals:
        yield host


async def test_a_record_of_a_process_that_has_died_is_nobody() -> None:
    """After a kill -9 the record lasts until it expires, 20 seconds later."""
    async with rivals_of(record(ELDER, NOBODY)) as rivals:
        await rivals.require_alone()


async def test_a_process_that_lives_is_named() -> None:
    async with another(ELDER) as host, rivals_of(record(ELDER, host.endpoint)) as rivals:
        with pytest.raises(Fatal) as refused:
            await rivals.require_alone()
    message = str(refused.value)
    assert f"another process serves under this identity at {host.endpoint} since 1970-01-01 00:16:40 UTC" in message
    assert "--identity" in message
    assert "\n" not in message


async def test_one_that_has_no_answer_from_here_is_asked_by_other_peers() -> None:
    """The address that the other process announces may work only inside its own network."""
    async with AsyncExitStack() as stack:
        elder = await stack.enter_async_context(another(ELDER))
        other = Host(OTHER.peer_id, 0)
        other.rivals = await stack.enter_async_context(rivals_of(record(ELDER, elder.endpoint), who=OTHER))
        await stack.enter_async_context(serving(other, OTHER))
        others_record = record(ELDER, other.endpoint, who=OTHER, stage=0)
        ours = await stack.enter_async_context(rivals_of(record(ELDER, NOBODY), others_record))
        with pytest.raises(Fatal, match=f"another process serves under this identity at {elder.endpoint}"):
            await ours.require_alone()
        for nonce in (OWN.nonce, "dd" * 8, "ee" * 8):
            caller = pb.Incarnation(peer_id=ME.peer_id, nonce=nonce, started_at=OWN.started_at, begins=True)
            assert (await other.rivals.of(caller) is not None) == (nonce == OWN.nonce)
        assert elder.num_asked == 1, "whoever asks others costs them no more than that"


async def test_nobody_else_can_say_that_there_is_a_rival() -> None:
    async with AsyncExitStack() as stack:
        elder = await stack.enter_async_context(another(ELDER))
        assert elder.rivals is not None
        liar = await stack.enter_async_context(serving(Host(OTHER.peer_id, 0), OTHER))
        ours = await stack.enter_async_context(
            rivals_of(record(ELDER, NOBODY), record(ELDER, liar.endpoint, who=OTHER, stage=0))
        )
        once = await elder.rivals.of(pb.Incarnation(peer_id=ME.peer_id, nonce="dd" * 8, begins=True))
        assert once is not None, "so it answered another start, which is long gone"
        for made_up in (once, pb.Incarnation(peer_id=ME.peer_id, nonce=ELDER.nonce, endpoint=NOBODY)):
            liar.made_up = made_up
            await ours.require_alone()
        assert liar.num_asked == 2


async def test_who_begins_leaves_whatever_its_clock_says() -> None:
    """A copy may say that it has been there for ever."""
    async with another(YOUNGER) as host, rivals_of(record(YOUNGER, host.endpoint)) as rivals:
        with pytest.raises(Fatal, match="another process serves under this identity"):
            await rivals.require_alone()


async def looked(clock: ManualClock, num_looks: int, watching: asyncio.Task[None], *, leaves: bool = False) -> None:
    """Let some looks pass. Returns once `watching` has ended if it is to end."""
    for _ in range(num_looks):
        for _ in range(3):
            await asyncio.sleep(0)
        clock.advance(LOOK_SECONDS)
    if leaves:
        with pytest.raises(Fatal, match="another process serves under this identity"):
            await asyncio.wait_for(watching, 10.0)
        return
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert not watching.done()


@pytest.mark.parametrize("nonce", ["00" * 8, "ff" * 8])
async def test_who_was_announced_alone_stays_whatever_another_one_says(
    nonce: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    copy, clock = Incarnation(nonce=nonce, started_at=0.0), ManualClock()
    member = Membership.enter(CONFIG, MemoryStore(clock), ME, clock, insecure=False)
    async with another(copy) as host, AsyncExitStack() as stack:
        stack.push_async_callback(member.channels.close)
        member.known.records[Block(1)] = [record(OWN, NOBODY)]
        rivals = Rivals(member, own=Incarnation(nonce=OWN.nonce))
        watching = asyncio.create_task(rivals.watch())
        await looked(clock, 8, watching)
        # The directory has one record of an id at a stage, and the copy's may hide this one's.
        member.known.records[Block(1)] = [record(copy, host.endpoint)]
        await looked(clock, 3, watching)
        asked = pb.Incarnation(peer_id=ME.peer_id, nonce=nonce, started_at=0.0)
        assert await rivals.of(asked) is not None, "and the copy is told so"
        assert f"another process has started under this identity, at {host.endpoint}" in caplog.text
        # Once this process was stopped for a while, the copy may have been there first.
        clock.advance(60.0)
        await looked(clock, 2, watching, leaves=nonce < OWN.nonce)
        watching.cancel()


@pytest.mark.parametrize("there", [Incarnation(nonce="00" * 8), Incarnation(nonce="ff" * 8)], ids=["lower", "higher"])
async def test_of_two_that_came_at_the_same_time_one_leaves(there: Incarnation) -> None:
    clock = ManualClock()
    async with another(there) as host, rivals_of(record(there, host.endpoint), clock=clock) as rivals:
        watching = asyncio.create_task(rivals.watch())
        leaves = there.nonce < OWN.nonce
        await looked(clock, 2, watching, leaves=leaves)
        asked = pb.Incarnation(peer_id=ME.peer_id, nonce=there.nonce)
        assert (await rivals.of(asked) is None) == leaves
        watching.cancel()
