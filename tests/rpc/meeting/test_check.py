"""Peers dial each other back: what they reach, and what they never dial or reveal."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from threading import Event
from typing import Any

import pytest

from swarm.credentials.identity import generate
from swarm.errors import MalformedMessage, NotAllowed, Overloaded
from swarm.machine.clock import SystemClock
from swarm.rpc import tls
from swarm.rpc.meeting import check as checks
from swarm.rpc.meeting.check import DialBack, check
from swarm.rpc.meeting.dialler import Points
from swarm.rpc.v1 import meeting_pb2 as pb
from tests.support import locked
from tests.support.chain import eventually
from tests.support.meeting import meeting_point
from tests.support.virtual_time import LoopClock, in_virtual_time

OWN, OTHER = generate(), generate()
Serve = Callable[..., Awaitable[int]]


class From:
    """The context of a call from some address."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        """The caller's address, as gRPC writes it."""
        return self._peer

    def auth_context(self) -> dict[str, Any]:
        """Show no certificate."""
        return {}


async def _node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with the bytes with which libp2p begins."""
    writer.write(b"\x13/multistream/1.0.0\n")
    await reader.read()
    writer.close()


async def test_the_ports_that_answer_as_the_caller_are_reached_and_no_others(serve: Serve) -> None:
    port, others_port = [await serve(credentials=tls.server_credentials(own)) for own in (OWN, OTHER)]
    node = await asyncio.start_server(_node, "127.0.0.1", 0)
    node_port = node.sockets[0].getsockname()[1]
    async with meeting_point() as host:
        channel = await Points(None, insecure=False).connect(host.entry)
        request = pb.CheckRequest(
            peer_id=OWN.peer_id,
            endpoints=[f"127.0.0.1:{port}", f":{port}", f":{others_port}", "127.0.0.1:1"],
            dht_endpoints=[f":{node_port}", f":{port}", ":1"],
        )
        reply = await check(channel, request, seconds=5.0)
        assert reply.observed_host == "127.0.0.1"
        assert list(reply.endpoints) == [f"127.0.0.1:{port}", f"127.0.0.1:{port}"]
        assert list(reply.dht_endpoints) == [f"127.0.0.1:{node_port}"]
        with pytest.raises(Overloaded):
            await check(channel, request, seconds=5.0)
        await channel.close()
    node.close()


@in_virtual_time
async def test_what_drops_packets_is_given_up_after_the_same_time_as_what_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "DIAL_SECONDS", 0.3)
    dialled: list[tuple[str, int]] = []

    async def dial(host: str, port: int) -> str:
        dialled.append((host, port))
        if port == 2:
            await asyncio.sleep(10.0)
        raise ConnectionRefusedError

    monkeypatch.setattr(checks, "shown_certificate", dial)
    for port in (1, 2):
        clock = LoopClock()
        dial_back, began_at = DialBack(clock, insecure=False), clock.monotonic()
        reply = await dial_back.answer(
            pb.CheckRequest(peer_id=OWN.peer_id, endpoints=[f"198.51.100.7:{port}"]), From("ipv4:192.0.2.1:999")
        )
        assert not reply.endpoints
        assert clock.monotonic() - began_at == pytest.approx(0.3)
    assert dialled == [("198.51.100.7", 1), ("198.51.100.7", 2)]


async def test_a_stranger_cannot_have_this_machine_or_its_network_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dial(host: str, port: int) -> str:
        raise AssertionError(f"{host} was dialled")

    monkeypatch.setattr(checks, "shown_certificate", dial)
    monkeypatch.setattr(checks, "is_node", dial)
    dial_back = DialBack(SystemClock(), insecure=False)
    request = pb.CheckRequest(
        peer_id=OWN.peer_id,
        endpoints=["[::ffff:127.0.0.1]:22", "[::1]:22", "0.0.0.0:22", "169.254.169.254:80"],
        dht_endpoints=["10.0.0.1:22", "198.51.100.7:22"],
    )
    reply = await dial_back.answer(request, From("ipv4:192.0.2.1:999"))
    assert reply.observed_host == "192.0.2.1"
    assert not reply.endpoints
    assert not reply.dht_endpoints


async def test_with_a_trainers_token_one_may_ask_about_oneself(serve: Serve) -> None:
    """swarm-doctor asks like this, for a machine that may serve one day."""
    port = await serve(credentials=tls.server_credentials(locked.TRAINER))
    async with meeting_point(locked.PEER, authority=locked.PEER.authority) as host:
        channel = await Points(locked.TRAINER, insecure=False).connect(host.entry)
        request = pb.CheckRequest(peer_id=locked.TRAINER.peer_id, endpoints=[f":{port}"])
        assert list((await check(channel, request, seconds=5.0)).endpoints) == [f"127.0.0.1:{port}"]
        with pytest.raises(NotAllowed):
            await check(channel, pb.CheckRequest(peer_id=OWN.peer_id, endpoints=[f":{port}"]), seconds=5.0)
        await channel.close()


async def test_an_address_of_a_version_of_ip_that_is_not_here_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dial(host: str, port: int) -> str:
        raise ConnectionRefusedError

    monkeypatch.setattr(checks, "own_versions", lambda: {4})
    monkeypatch.setattr(checks, "shown_certificate", dial)
    monkeypatch.setattr(checks, "DIAL_SECONDS", 0.1)
    request = pb.CheckRequest(
        peer_id=OWN.peer_id, endpoints=["192.0.2.1:1", "[2001:db8::1]:1"], dht_endpoints=["[2001:db8::1]:2"]
    )
    reply = await DialBack(SystemClock(), insecure=False).answer(request, From("ipv4:192.0.2.1:999"))
    assert list(reply.untried) == ["[2001:db8::1]:1", "[2001:db8::1]:2"]
    assert not reply.endpoints


async def test_a_caller_that_came_through_a_tunnel_is_not_dialled() -> None:
    dial_back = DialBack(SystemClock(), insecure=False)
    reply = await dial_back.answer(pb.CheckRequest(peer_id=OWN.peer_id, endpoints=[":22"]), From("ipv4:127.77.3.4:999"))
    assert reply == pb.CheckReply()


@pytest.mark.parametrize("endpoints", [["nonsense"], ["192.0.2.1:0"], [":1"] * 5, [":70000"], ["192.0.2.1"]])
async def test_nonsense_is_refused(endpoints: list[str]) -> None:
    dial_back = DialBack(SystemClock(), insecure=False)
    with pytest.raises(MalformedMessage):
        await dial_back.answer(pb.CheckRequest(peer_id=OWN.peer_id, endpoints=endpoints), From("ipv4:192.0.2.1:999"))


async def test_names_are_looked_up_for_a_few_callers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up, may_end = list[str](), Event()

    def look_up(host: str, port: int | None, **_: Any) -> list[Any]:
        looked_up.append(host)
        may_end.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    dial_back = DialBack(SystemClock(), insecure=False)
    asking = [
        asyncio.create_task(
            dial_back.answer(pb.CheckRequest(endpoints=[f"{i}.slow.example:1"] * 4), From(f"ipv4:192.0.2.{i}:999"))
        )
        for i in range(2 * checks.AT_ONCE)
    ]
    try:
        await eventually(lambda: len(looked_up) == checks.MOST_NAMES)
        # What this process itself looks up is not held up by them.
        assert await asyncio.get_running_loop().run_in_executor(None, lambda: "its own") == "its own"
        assert len(looked_up) == checks.MOST_NAMES
    finally:
        may_end.set()
        await asyncio.gather(*asking)
