"""A peer that others do not reach, reached through meeting points: carried, punched, and when a meeting point dies."""

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import pytest

from swarm.credentials.identity import Identity, generate
from swarm.errors import DeadlineExceeded, NotAllowed, Overloaded, SwarmError, WrongRun
from swarm.machine.clock import SystemClock
from swarm.rpc.channels import ChannelPool
from swarm.rpc.entry import Entry
from swarm.rpc.failures import translate
from swarm.rpc.meeting import meeting_point as meeting_points
from swarm.rpc.meeting import waiting as waitings
from swarm.rpc.meeting import ways
from swarm.rpc.meeting.carrying import Kind, MeetingLimits, TcpStream
from swarm.rpc.meeting.dialler import Points
from swarm.rpc.meeting.meeting_point import signed_bytes
from swarm.rpc.v1 import meeting_pb2 as pb
from swarm.rpc.v1.meeting_pb2_grpc import MeetingServiceStub
from swarm.types import PeerId
from tests.support import locked
from tests.support.chain import PATIENCE_SECONDS, eventually
from tests.support.meeting import Host, echo, hidden_peer, meeting_point
from tests.support.proxy import Proxy

MEGABYTE = bytes(range(256)) * (4 << 10)


@pytest.fixture
def no_punching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no punching work, as between routers that give every connection another port."""

    async def punch(*_: object) -> None:
        return None

    monkeypatch.setattr(ways, "punch", punch)


@pytest.mark.usefixtures("no_punching")
async def test_what_is_called_through_a_meeting_point_arrives_whole_and_from_an_address_of_the_callers_own() -> None:
    async with meeting_point() as host, hidden_peer([host.entry]) as hidden:
        assert hidden.record.endpoint == f"tunnel:{host.entry}"
        pool = ChannelPool()
        for bulk in (False, True):
            assert await echo(pool.channel(hidden.record, bulk=bulk), MEGABYTE) == MEGABYTE
        assert pool.is_connected(hidden.record)
        assert host.point.budget.num_connections == 2
        assert host.point.budget.num_bytes > 4 * len(MEGABYTE)
        assert hidden.waiting.num_lines(Kind.RELAYED) == 2
        # All calls count as one caller's, which is not taken for this machine itself: that would have no limits.
        assert all(peer.startswith("ipv4:127.77.") for peer in hidden.callers)
        assert len({peer.rpartition(":")[0] for peer in hidden.callers}) == 1
        await pool.close()
        await eventually(lambda: host.point.budget.num_connections == 0)
        await eventually(lambda: hidden.waiting.num_lines(Kind.RELAYED) == 0)


async def test_a_carried_connection_is_followed_by_a_punched_one_and_no_call_fails(pool: ChannelPool) -> None:
    async with meeting_point() as host, hidden_peer([host.entry]) as hidden:
        record = hidden.record
        first = pool.channel(record)
        while pool.channel(record) is first:
            assert await echo(pool.channel(record)) == b"a"
        assert hidden.waiting.num_lines(Kind.PUNCHED) == 1
        carried = host.point.budget.num_bytes
        assert await echo(pool.channel(record), MEGABYTE) == MEGABYTE
        assert host.point.budget.num_bytes - carried < len(MEGABYTE)
        assert pool.is_connected(record)


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy"])
async def test_no_call_of_the_swarm_goes_through_the_proxy_for_downloads(
    pool: ChannelPool, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing listens there, and a true proxy would not know the way to a neighbour either.
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "*,example.com,10.0.0.0/8")
    async with meeting_point() as host, hidden_peer([host.entry]) as hidden:
        direct = hidden.record.model_copy(update={"endpoint": hidden.endpoint, "other_endpoints": ()})
        for record in (direct, hidden.record):
            assert await echo(pool.channel(record, bulk=True)) == b"a"
            assert await echo(pool.channel(record)) == b"a"
        watching = await Entry(hidden.own.peer_id, hidden.endpoint).connect(hidden.own, insecure=False)
        assert await echo(watching) == b"a"
        await watching.close()


async def test_a_line_that_is_found_while_its_pool_closes_is_closed(
    pool: ChannelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found:
        kind = Kind.PUNCHED
        is_open = True

        async def carry(self, stream: TcpStream) -> None:
            stream[1].close()
            await self.close()

        async def close(self) -> None:
            self.is_open = False

    lines, closing = list[Found](), list[asyncio.Task[None]]()

    async def punch(*_: object) -> Found:
        lines.append(Found())
        closing.append(asyncio.create_task(pool.close()))
        return lines[-1]

    monkeypatch.setattr(ways, "punch", punch)
    async with meeting_point() as host, hidden_peer([host.entry]) as hidden:
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await echo(pool.channel(hidden.record), b"a")
        await eventually(lambda: bool(closing))
        await closing[0]
        assert not lines[0].is_open


async def test_another_meeting_point_takes_over_from_one_that_dies(pool: ChannelPool) -> None:
    async with (
        meeting_point() as first,
        meeting_point() as second,
        hidden_peer([first.entry, second.entry]) as hidden,
    ):
        record = hidden.record
        assert await echo(pool.channel(record)) == b"a"
        dying = first if record.endpoint.endswith(str(first.entry)) else second
        await dying.server.stop(None)
        # Calls under way break with the connection, so their callers try again.
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                with suppress(grpc.aio.AioRpcError):
                    assert await echo(pool.channel(record), b"b") == b"b"
                    break
        await eventually(lambda: len(hidden.waiting.endpoints) == 1)
        assert str(dying.entry) not in hidden.waiting.endpoints[0]


async def test_a_peer_that_slept_waits_at_once_where_it_waited_before() -> None:
    class Stopped(SystemClock):
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Stopped()
    async with (
        meeting_point() as host,
        Proxy(host.entry.host, host.entry.port) as path,
        hidden_peer([Entry(host.entry.peer_id, path.address)], clock=clock) as hidden,
    ):
        # The meeting point gave the silent peer up, and the router forgot its connection.
        clock.now = 60.0
        path.cut()
        await eventually(lambda: not hidden.waiting.endpoints)
        await eventually(lambda: bool(hidden.waiting.endpoints))
        assert host.point.num_waiting == 1


@pytest.mark.usefixtures("no_punching")
async def test_a_direct_endpoint_that_is_dead_does_not_hide_the_tunnel(pool: ChannelPool) -> None:
    async with meeting_point() as host, hidden_peer([host.entry]) as hidden:
        dead = hidden.record.model_copy(update={"endpoint": "127.0.0.1:1", "other_endpoints": hidden.record.endpoints})
        assert await echo(pool.channel(dead)) == b"a"
        assert host.point.budget.num_connections == 1


async def test_whoever_answers_in_the_place_of_a_peer_fails_the_handshake(pool: ChannelPool) -> None:
    stranger = generate()
    async with meeting_point() as host, hidden_peer([host.entry]) as hidden:
        forged = hidden.record.model_copy(update={"certificate_pem": stranger.certificate_pem})
        with pytest.raises(grpc.aio.AioRpcError):
            await echo(pool.channel(forged), b"a", seconds=1.0)
        assert hidden.callers == []


@pytest.mark.usefixtures("no_punching")
async def test_a_meeting_point_of_several_runs_connects_peers_of_one_run_alone() -> None:
    async with meeting_point() as host, hidden_peer([host.entry], run_id="run.one") as hidden:
        for run_id in ("run.one", ""):  # A joiner does not know its run yet.
            pool = ChannelPool(run_id=run_id)
            assert await echo(pool.channel(hidden.record)) == b"a"
            await pool.close()
        assert isinstance(
            await _refusal(host, "Connect", pb.Carried(to=hidden.own.peer_id, run_id="run.two")), WrongRun
        )
        async with await Points(None, insecure=False).connect(host.entry) as channel:
            stub: Any = MeetingServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match=r"run 'run\.two' is not 'run\.one'"):
                await stub.Meet(pb.MeetRequest(to=hidden.own.peer_id, run_id="run.two")).read()


async def test_a_peer_does_for_its_own_run_alone_what_a_meeting_point_does() -> None:
    async with meeting_point(run_id="run.one") as host:
        channel = await Points(None, insecure=False).connect(host.entry)
        stub: Any = MeetingServiceStub(channel)
        waiting = stub.Wait()
        await waiting.read()
        await waiting.write(pb.WaitRequest(proof=pb.WaitProof(run_id="run.two")))
        for call in (
            waiting.read(),
            stub.Meet(pb.MeetRequest(to="a", run_id="run.two")).read(),
            stub.Check(pb.CheckRequest(run_id="run.two")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert isinstance(translate(caught.value), WrongRun)
        assert isinstance(await _refusal(host, "Connect", pb.Carried(to="a", run_id="run.two")), WrongRun)
        await channel.close()


async def test_nobody_waits_under_anothers_id() -> None:
    own, victim = generate(), generate()
    async with meeting_point() as host, meeting_point() as elsewhere:
        # The proofs are signed with another key, for another meeting point, and under another id than the key's.
        await _is_refused(host, victim.peer_id, victim, host, own)
        await _is_refused(host, own.peer_id, own, elsewhere, own)
        await _is_refused(host, victim.peer_id, own, host, own)
        assert host.point.num_waiting == 0


async def _is_refused(host: Host, claimed: PeerId, shown: Identity, signed_for: Host, signer: Identity) -> None:
    channel = await Points(None, insecure=False).connect(host.entry)
    call: Any = MeetingServiceStub(channel).Wait()
    challenge = (await call.read()).challenge
    signature = signer.sign(signed_bytes(signed_for.entry.peer_id, shown.peer_id, challenge))
    proof = pb.WaitProof(peer_id=claimed, certificate_pem=shown.certificate_pem, signature=signature)
    await call.write(pb.WaitRequest(proof=proof))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(translate(caught.value), NotAllowed)
    await channel.close()


async def test_in_a_locked_run_its_members_wait_and_connect() -> None:
    own, hidden_own = locked.PEER, locked.OTHER_PEER
    async with (
        meeting_point(own, authority=own.authority) as host,
        hidden_peer([host.entry], hidden_own) as hidden,
    ):
        for caller in (own, locked.TRAINER):
            pool = ChannelPool(identity=caller)
            assert await echo(pool.channel(hidden.record)) == b"a"
            await pool.close()
        # A trainer serves nothing, so it may not wait at a meeting point.
        assert isinstance(await _refusal(host, "Wait", own=locked.TRAINER), NotAllowed)


async def test_a_meeting_point_takes_no_more_than_it_says_and_of_one_token_no_more_than_half() -> None:
    limits = MeetingLimits(max_waiting=2, max_connections=2)
    other = locked.issue().admit(generate())
    async with (
        meeting_point(locked.PEER, limits=limits, authority=locked.PEER.authority) as host,
        hidden_peer([host.entry], locked.OTHER_PEER) as hidden,
    ):
        # It has the token of the peer that waits.
        assert isinstance(await _refusal(host, "Wait", own=locked.PEER), Overloaded)
        async with hidden_peer([host.entry], other):
            assert host.point.num_waiting == 2
        pool = ChannelPool(identity=locked.OTHER_PEER)
        assert await echo(pool.channel(hidden.record)) == b"a"
        connecting = pb.Carried(to=hidden.own.peer_id)
        assert isinstance(await _refusal(host, "Connect", connecting, own=locked.PEER), Overloaded)
        others = ChannelPool(identity=other)
        assert await echo(others.channel(hidden.record)) == b"a"
        for each in (pool, others):
            await each.close()


@pytest.mark.usefixtures("no_punching")
async def test_one_caller_does_not_take_all_lines_of_a_hidden_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waitings, "MAX_LINES", 8)
    monkeypatch.setattr(meeting_points, "ANSWER_SECONDS", 0.5)
    async with meeting_point() as host, hidden_peer([host.entry]) as hidden:
        channel = await Points(None, insecure=False).connect(host.entry)
        stub: Any = MeetingServiceStub(channel)
        connecting = pb.Carried(to=hidden.own.peer_id)
        for _ in range(2):
            call = stub.Connect()
            await call.write(connecting)
            await call.read()
        assert isinstance(await _refusal(host, "Connect", connecting), DeadlineExceeded), "a quarter is taken"
        assert hidden.waiting.num_lines(Kind.RELAYED) == 2
        await channel.close()


async def _refusal(host: Host, method: str, *messages: pb.Carried, own: Identity | None = None) -> SwarmError:
    channel = await Points(own, insecure=False).connect(host.entry)
    call: Any = getattr(MeetingServiceStub(channel), method)()
    for message in messages:
        await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await call.read()
    await channel.close()
    return translate(caught.value)


async def test_a_meeting_point_reaches_those_that_wait_there_although_its_router_does_not_lead_back_to_itself() -> None:
    own = generate()
    async with (
        meeting_point(own) as host,
        Proxy(host.entry.host, host.entry.port) as outer,
        hidden_peer([Entry(host.entry.peer_id, outer.address)]) as hidden,
    ):
        # Nothing answers at the outer address that the hidden peer's record names.
        record = hidden.record.model_copy(update={"endpoint": f"tunnel:{host.entry.peer_id}@127.0.0.1:1"})
        pool = ChannelPool(identity=own)
        pool.points.serve_here(host.point.line_to)
        for bulk in (False, True):
            assert await echo(pool.channel(record, bulk=bulk), MEGABYTE) == MEGABYTE
        assert host.point.budget.num_bytes == 0, "its own work is no burden on what it carries for others"
        await pool.close()
        await eventually(lambda: hidden.waiting.num_lines(Kind.RELAYED) == 0)
        stranger = ChannelPool(identity=generate())
        with pytest.raises(grpc.aio.AioRpcError):
            await echo(stranger.channel(record), b"a", seconds=1.0)
        await stranger.close()
