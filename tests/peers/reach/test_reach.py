"""The addresses that a peer announces, depending on what others reach when they dial it back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import grpc
import pytest

from peers.reach import inquiry
from peers.reach import reach as reaches
from peers.reach.inquiry import Verdict
from peers.reach.listen import Listen, Outside, loopback_advice
from peers.reach.own_port import reserved
from peers.reach.reach import Reach
from peers.reach.router_ports import RouterPorts
from peers.shared.network import Membership
from scripts.benches.shared.ports import free_ports
from swarm.config import ModelConfig, RunConfig, StagesConfig
from swarm.credentials.identity import Identity, generate
from swarm.dht.node import DhtNode
from swarm.errors import Overloaded
from swarm.machine.clock import SystemClock
from swarm.rpc import probe, tls
from swarm.rpc.endpoint import LOOPBACK
from swarm.rpc.meeting import check as checks
from swarm.rpc.meeting.carrying import MeetingLimits
from swarm.rpc.serving import SERVER_OPTIONS, Front, bind_server
from swarm.rpc.v1 import meeting_pb2 as pb
from swarm.types import Block, PeerRecord, PeerState
from tests.support.chain import eventually
from tests.support.meeting import Host, meeting_point
from tests.support.memory_store import MemoryStore
from tests.support.proxy import Direction, Proxy

CONFIG = RunConfig(
    model=ModelConfig(num_layers=1, d_model=32, num_heads=2, vocab_size=64), stages=StagesConfig(num_stages=1)
)
CLOCK = SystemClock()
NODE_ID = "12D3KooWGRUVh6WhGUE1NEHGbHPhc3nCWzYLWvQYYTLvMaFRRxMH"
NAMED = pb.CheckRequest(endpoints=["peer.example:41001", ":5001"], dht_endpoints=["peer.example:41002", ":5002"])


@dataclass
class Node:
    """A node of the DHT that records whether it is a client."""

    is_client: bool = False

    async def become(self, *, client_mode: bool) -> None:
        """Do as DhtNode does."""
        self.is_client = client_mode


@dataclass
class Router:
    """A router that forwards every port, and records the ports that it was asked to forward."""

    asked: list[tuple[int, int]] = field(default_factory=list)
    host: str = "11.0.0.1"

    def forward(self, port: int, outer_port: int, lease_seconds: int) -> int:
        """Do as a router does."""
        self.asked.append((port, outer_port))
        return outer_port

    def end(self, port: int, outer_port: int) -> None:
        """Do as a router does."""

    def outer_host(self) -> str:
        """Do as a router does."""
        return self.host


@asynccontextmanager
async def _reach(
    limits: MeetingLimits | None = None,
    *,
    host: str = "127.0.0.1",
    is_known: bool = True,
    others: Sequence[str] = (),
    largest_bytes: int | None = None,
    dht_ports: tuple[int, int] = (5002, 5002),
    router: Router | None = None,
    own: Identity | None = None,
    own_hosts: Callable[[], tuple[Outside, ...]] | None = None,
    behind_front: tuple[int, int] | None = None,
) -> AsyncIterator[tuple[Reach, Node, Host]]:
    """The reach of a peer that finds one other peer in the run (at further endpoints too), or no peer.

    Args:
        largest_bytes: what is written at once is lost on its way there if it is more than that.
        dht_ports: the port of the DHT's node, and the one that the user says others reach.
        behind_front: the ports of the loopback, if the first of `dht_ports` is one for both.
    """
    own, other, node = own or generate(), generate(), Node()
    async with meeting_point(other, limits=limits) as point, Proxy(point.entry.host, point.entry.port) as path:
        if largest_bytes is not None:
            path.links[Direction.TO_SERVER].largest_bytes = largest_bytes
        member = Membership.enter(CONFIG, MemoryStore(CLOCK), own, CLOCK, insecure=False)
        record = PeerRecord(
            peer_id=other.peer_id, announced_at=CLOCK.time(), stage=0,
            endpoint=point.entry.endpoint if largest_bytes is None else path.address,
            other_endpoints=tuple(others),
            certificate_pem=other.certificate_pem, state=PeerState.SERVING,
        )  # fmt: skip
        member.known.update(Block(0), [record] if is_known else [])
        listen = Listen(
            host=host, port=0 if behind_front is None else dht_ports[0], behind_front=behind_front,
            outside=(Outside("127.0.0.1"),), own=(Outside("127.0.0.1"),) if own_hosts else (),
            dht_addresses=(f"/ip4/127.0.0.1/tcp/{dht_ports[1]}/p2p/{NODE_ID}",), dht_port=dht_ports[0],
        )  # fmt: skip
        router_ports = None if router is None else RouterPorts(CLOCK, [router])
        reach = Reach(member, cast(DhtNode, node), listen, router_ports=router_ports, own=own_hosts)
        keeping = asyncio.create_task(reach.keep())
        try:
            yield reach, node, point
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await member.channels.close()


@pytest.fixture
def nobody_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the peers that dial back get no answer, as if this peer were behind a router."""

    async def dial(host: str, port: int) -> str:
        raise ConnectionRefusedError

    async def is_node(host: str, port: int) -> bool:
        return False

    monkeypatch.setattr(checks, "shown_certificate", dial)
    monkeypatch.setattr(checks, "is_node", is_node)


async def test_a_peer_that_is_reached_announces_its_endpoint_and_keeps_its_port() -> None:
    async with _reach() as (reach, node, _):
        await reach.found_out()
        assert reach.endpoints == (f"127.0.0.1:{reach.port}",)
        # Nobody answers at the DHT's port here.
        await eventually(lambda: node.is_client)
        assert reach.announced(reach.port).dht_addresses == ()


async def test_one_server_at_a_time_has_the_port_whenever_others_dial_back(monkeypatch: pytest.MonkeyPatch) -> None:
    replies, may_go_on = list[pb.CheckReply](), asyncio.Event()

    async def check(channel: grpc.aio.Channel, request: pb.CheckRequest, *, seconds: float) -> pb.CheckReply:
        await may_go_on.wait()
        replies.append(await checks.check(channel, request, seconds=seconds))
        return replies[-1]

    monkeypatch.setattr(inquiry, "check", check)
    monkeypatch.setattr(checks, "GAP_SECONDS", 0.0)
    for name in ("AGAIN_SECONDS", "DOUBT_SECONDS"):
        monkeypatch.setattr(reaches, name, 0.0)

    async def is_dialled_back() -> None:
        num_before = len(replies)
        may_go_on.set()
        await eventually(lambda: len(replies) > num_before + 2)
        may_go_on.clear()
        assert all(reply.endpoints for reply in replies[num_before + 1 :]), "it was reached each time"

    own = generate()
    async with _reach(own=own) as (reach, _, _):
        await is_dialled_back()
        # The peer moves on to another stage's server, and each begins while others dial back.
        for _ in range(2):
            async with reach.held():
                server = grpc.aio.server(options=SERVER_OPTIONS)
                bind_server(server, reach.host, reach.port, tls.server_credentials(own))
                await server.start()
                await is_dialled_back()
                await server.stop(None)
            await is_dialled_back()


@pytest.mark.usefixtures("nobody_gets_through")
async def test_a_peer_that_is_not_reached_waits_at_another_one_and_says_which_ports_to_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _reach(host="") as (reach, node, host):
        await reach.found_out()
        assert reach.endpoints == (f"tunnel:{host.entry}",)
        await eventually(lambda: node.is_client)
        line = next(record.message for record in caplog.records if "by way of further peers" in record.message)
        assert f"no answer at 127.0.0.1:{reach.port} (gRPC) and 127.0.0.1:5002 (DHT). To be reached" in line


async def test_a_peer_that_was_not_reached_by_accident_is_soon_reached_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [pb.CheckReply(observed_host="127.0.0.1")]

    async def check(channel: grpc.aio.Channel, request: pb.CheckRequest, *, seconds: float) -> pb.CheckReply:
        return answers.pop() if answers else await checks.check(channel, request, seconds=seconds)

    monkeypatch.setattr(inquiry, "check", check)
    monkeypatch.setattr(reaches, "DOUBT_SECONDS", 0.01)
    monkeypatch.setattr(checks, "GAP_SECONDS", 0.0)
    async with _reach() as (reach, _, _):
        await eventually(lambda: reach.endpoints[:1] == (f"127.0.0.1:{reach.port}",))
        assert not answers


async def test_one_port_that_grpc_and_the_dht_share_is_reached_and_announced_for_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reaches, "DOUBT_SECONDS", 0.05)
    monkeypatch.setattr(checks, "GAP_SECONDS", 0.0)
    (port,) = free_ports(1)
    with reserved(LOOPBACK) as one, reserved(LOOPBACK) as other:
        inner = one.getsockname()[1], other.getsockname()[1]
        async with (
            Front(*inner).listening(LOOPBACK, port),
            _reach(host="", dht_ports=(port, port), behind_front=inner) as (reach, node, _),
        ):
            await reach.found_out()
            assert (reach.host, reach.port, reach.open_port) == (LOOPBACK, inner[0], port)
            # Nothing listens in the node's place until it is a client.
            await eventually(lambda: node.is_client)
            await eventually(lambda: not node.is_client)
            announced = reach.announced(reach.port)
    assert announced.endpoints == (f"127.0.0.1:{port}",)
    assert announced.dht_addresses == (f"/ip4/127.0.0.1/tcp/{port}/p2p/{NODE_ID}",)


@pytest.mark.usefixtures("nobody_gets_through")
async def test_a_peer_whose_meeting_points_are_gone_stays_announced_for_those_that_have_punched_a_way_to_it() -> None:
    async with _reach() as (reach, _, host):
        await reach.found_out()
        announced = reach.announced(reach.port)
        assert announced.endpoints == (f"tunnel:{host.entry}",)
        await host.server.stop(None)
        await eventually(lambda: not reach.endpoints)
        assert reach.announced(reach.port) == announced


@pytest.mark.usefixtures("nobody_gets_through")
@pytest.mark.parametrize("host", ["", "127.0.0.1"])
async def test_a_peer_that_nobody_takes_in_does_not_serve_and_says_why(
    host: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaches, "SAY_SECONDS", 0.1)
    async with _reach(MeetingLimits(max_waiting=0), host=host) as (reach, _, _):
        finding_out = asyncio.create_task(reach.found_out())
        await eventually(lambda: "nobody can reach this peer" in caplog.text)
        assert not finding_out.done()
        finding_out.cancel()
        await asyncio.wait([finding_out])
        assert reach.endpoints == ()
        line = next(record.message for record in caplog.records if "nobody can reach this peer" in record.message)
        if host:
            assert line.endswith(f"and {loopback_advice(host)}"), "no firewall lets others in there"
        else:
            assert f":{reach.port} (gRPC)" in line
            assert "5002" in line


async def test_a_peer_that_others_have_no_time_for_asks_again_before_it_announces_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This happens where two peers behind one router begin at the same moment."""
    num_asked, ask = 0, checks.check

    async def check(channel: grpc.aio.Channel, request: pb.CheckRequest, *, seconds: float) -> pb.CheckReply:
        nonlocal num_asked
        num_asked += 1
        if num_asked <= inquiry.NUM_TRIES:
            raise Overloaded("this caller has just been dialled back", retry_after_seconds=1.0)
        return await ask(channel, request, seconds=seconds)

    for module, name, value in (
        (inquiry, "check", check),
        (inquiry, "GAP_SECONDS", 0.01),
        (reaches, "LOOK_SECONDS", 0.01),
    ):
        monkeypatch.setattr(module, name, value)
    async with _reach() as (reach, _, _):
        await reach.found_out()
        assert num_asked == inquiry.NUM_TRIES + 1
        assert reach.endpoints == (f"127.0.0.1:{reach.port}",)


async def test_a_peer_to_which_only_short_messages_pass_does_not_serve_and_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "LONG_SECONDS", 0.2)
    async with _reach(largest_bytes=1300) as (reach, _, _):
        finding_out = asyncio.create_task(reach.found_out())
        await eventually(lambda: "none that takes several packets" in caplog.text)
        assert reach.endpoints == ()
        finding_out.cancel()
        await asyncio.wait([finding_out])
        assert finding_out.cancelled()


@pytest.mark.parametrize(
    ("replies", "endpoints", "dht_endpoints", "num_reached"),
    [
        # What was named is reached by one of two.
        (
            [("192.0.2.1", ["peer.example:41001"], []), ("192.0.2.1", [], ["peer.example:41002"])],
            ("peer.example:41001",), ("peer.example:41002",), 1,
        ),
        # A router forwards the ports, and all see the same address.
        (
            [("192.0.2.1", ["192.0.2.1:5001"], ["192.0.2.1:5002"])] * 2,
            ("192.0.2.1:5001",), ("192.0.2.1:5002",), 2,
        ),
        # One of three makes up an address.
        (
            [("192.0.2.1", [], []), ("192.0.2.1", [], []), ("198.51.100.9", ["198.51.100.9:5001"], [])],
            (), (), 1,
        ),
        # Nobody asked about that.
        ([("192.0.2.1", ["192.0.2.1:22", "198.51.100.9:5001"], [])], (), (), 1),
    ],
)  # fmt: skip
def test_of_what_is_said_so_much_counts(
    replies: list[tuple[str, list[str], list[str]]], endpoints: tuple[str, ...], dht_endpoints: tuple[str, ...],
    num_reached: int,
) -> None:  # fmt: skip
    told = [pb.CheckReply(observed_host=host, endpoints=ends, dht_endpoints=dht) for host, ends, dht in replies]
    verdict = Verdict.of(NAMED, told)
    assert verdict == Verdict(
        endpoints=endpoints, dht_endpoints=dht_endpoints, num_asked=len(told), num_reached=num_reached
    )


async def test_an_address_that_changes_in_mid_run_is_announced_once_others_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert reaches.AGAIN_SECONDS + reaches.DOUBT_SECONDS < 60.0
    monkeypatch.setattr(reaches, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(reaches, "DOUBT_SECONDS", 0.01)
    monkeypatch.setattr(checks, "GAP_SECONDS", 0.0)
    hosts = ["127.0.0.1"]
    asked: list[Sequence[str]] = []

    async def check(_: grpc.aio.Channel, request: pb.CheckRequest, **__: object) -> pb.CheckReply:
        asked.append(request.endpoints)
        reached, nodes = (
            [end for end in ends if end.startswith(tuple(hosts))] for ends in (request.endpoints, request.dht_endpoints)
        )
        return pb.CheckReply(observed_host="192.0.2.7", endpoints=reached, dht_endpoints=nodes)

    monkeypatch.setattr(inquiry, "check", check)
    async with _reach(host="", own_hosts=lambda: tuple(map(Outside, hosts))) as (reach, _, _):
        await eventually(lambda: reach.endpoints == (f"127.0.0.1:{reach.port}",))
        hosts[:] = ["192.0.2.7"]
        await eventually(lambda: reach.endpoints == (f"192.0.2.7:{reach.port}",))
        hosts[:] = ["192.0.2.7", "11.0.0.7"]
        await eventually(lambda: f"11.0.0.7:{reach.port}" in reach.endpoints)
        links = {f"/ip4/{host}/tcp/5002/p2p/{NODE_ID}" for host in hosts}
        await eventually(lambda: links == set(reach.announced(reach.port).dht_addresses))
        hosts[:] = []
        before = len(asked)
        await eventually(lambda: len(asked) > before + 3)
        assert asked[-1][0] == f"192.0.2.7:{reach.port}", "a network that is gone for a moment changes nothing"


@pytest.mark.parametrize(("host", "is_told"), [("11.0.0.1", True), ("100.64.3.1", False)], ids=["a home", "CGNAT"])
async def test_the_first_peer_asks_its_router_and_announces_what_that_says(host: str, is_told: bool) -> None:
    router = Router(host=host)
    at_home = (Outside("192.168.1.7"),)
    async with _reach(host="", is_known=False, router=router, own_hosts=lambda: at_home) as (reach, _, _):
        await reach.found_out()
        own = (f"192.168.1.7:{reach.port}",)
        assert router.asked == [(reach.port, reach.port), (5002, 5002)]
        assert reach.endpoints == ((f"{host}:{reach.port}", *own) if is_told else own)
        dht = f"/ip4/{host}/tcp/5002/p2p/{NODE_ID}"
        assert (dht in reach.announced(reach.port).dht_addresses) is is_told
