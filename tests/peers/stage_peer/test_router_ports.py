"""Ports that a router forwards on request: a responder that speaks NAT-PMP, and what is made of its answers."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from peers.stage_peer import router_ports
from peers.stage_peer.router_ports import NatPmp, RouterPorts, default_gateway
from tests.support.chain import eventually
from tests.support.manual_clock import ManualClock

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
"""

Answer = Callable[[int, int, int], bytes]
"""Own port, outer port and lease of a request -> the reply."""


def _grant(port: int, outer_port: int, lease_seconds: int, *, own: int = 0, result: int = 0) -> bytes:
    return struct.pack("!BBHIHHI", 0, 130, result, 7, own or port, outer_port and outer_port + 1000, lease_seconds)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router of these tests may be slow."""
    monkeypatch.setattr(router_ports, "TRIES_SECONDS", (0.25, 4.0))


@contextmanager
def _router(answer: Answer, asked: list[tuple[int, int, int]]) -> Iterator[tuple[str, int]]:
    """A router that answers from a thread, after it has missed the first datagram. Where it is slow it may get a
    request twice, which counts once."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(0.1)
        is_over = threading.Event()

        def serve() -> None:
            is_first = True
            while not is_over.is_set():
                try:
                    data, sender = sock.recvfrom(64)
                except TimeoutError:
                    continue
                _, _, _, port, outer_port, lease_seconds = struct.unpack("!BBHHHI", data)
                if not is_first:
                    request = (port, outer_port, lease_seconds)
                    if asked[-1:] != [request]:
                        asked.append(request)
                    sock.sendto(answer(port, outer_port, lease_seconds), sender)
                is_first = False

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield sock.getsockname()
        finally:
            is_over.set()
            thread.join()


async def test_ports_are_forwarded_renewed_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    clock = ManualClock()
    with _router(_grant, asked) as address:
        ports = RouterPorts(clock, [NatPmp(address)])
        assert await ports.ask([5001, 5002])
        assert ports.outer == {5001: 6001, 5002: 6002}
        keeping = asyncio.create_task(ports.keep())
        await asyncio.sleep(0)
        clock.advance(router_ports.RENEW_SECONDS)
        await eventually(lambda: len(asked) == 4)
        keeping.cancel()
        lease = router_ports.LEASE_SECONDS
        assert asked == [(5001, 5001, lease), (5002, 5002, lease), (5001, 6001, lease), (5002, 6002, lease)]
        await ports.release()
        assert asked[4:] == [(5001, 0, 0), (5002, 0, 0)]
        assert not ports.outer


@pytest.mark.parametrize(
    "answer",
    [
        lambda port, outer, lease: _grant(port, outer, lease, result=2),
        lambda port, outer, lease: _grant(port, outer, lease, own=1),
        lambda port, outer, lease: _grant(port, 0, lease),
        lambda port, outer, lease: b"\0\x82",
    ],
    ids=["refused", "another port", "no port", "cut off"],
)
async def test_a_refusal_or_nonsense_forwards_nothing(answer: Answer) -> None:
    with _router(answer, []) as address:
        ports = RouterPorts(ManualClock(), [NatPmp(address)])
        assert not await ports.ask([5001, 5002])
        assert not ports.outer


def test_the_default_gateway_is_read_from_the_table_of_routes() -> None:
    assert default_gateway(ROUTES) == "10.0.0.1"
    assert default_gateway(ROUTES.rpartition("eth0")[0]) is None
