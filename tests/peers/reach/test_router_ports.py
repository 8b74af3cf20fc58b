"""Ports that a router forwards on request: one that speaks PCP or NAT-PMP, and what is made of its answers."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from peers.reach import router_ports
from peers.reach.router_ports import NatPmp, Pcp, RouterPorts
from tests.support.chain import eventually
from tests.support.manual_clock import ManualClock

Request = tuple[int, int, int]
"""Own port, outer port and lease."""
Answer = Callable[[bytes], tuple[Request, bytes]]
"""A datagram -> what it asks for, and the reply."""


def _nat_pmp(grant: Callable[[int, int, int], bytes]) -> Answer:
    def answer(data: bytes) -> tuple[Request, bytes]:
        _, _, _, port, outer_port, lease_seconds = struct.unpack("!BBHHHI", data)
        return (port, outer_port, lease_seconds), grant(port, outer_port, lease_seconds)

    return answer


def _pcp(data: bytes, *, change: Callable[[bytes], bytes] = bytes) -> tuple[Request, bytes]:
    """A router that speaks PCP, on the wire as RFC 6887 has it."""
    version, operation, _, lease_seconds, client, nonce, protocol, _, port, outer_port, suggested = struct.unpack(
        "!BBHI16s12sB3sHH16s", data
    )
    assert (version, operation, protocol) == (2, 1, 6)
    assert client == suggested[:12] + b"\x7f\0\0\x01", "the address from which the datagram comes"
    granted = outer_port and outer_port + 1000
    reply = struct.pack("!BBBBII12x", 2, 129, 0, 0, lease_seconds, 7)
    reply += struct.pack("!12sB3xHH12s4s", nonce, 6, port, granted, suggested[:12], bytes([11, 0, 0, 7]))
    return (port, outer_port, lease_seconds), change(reply)


def _grant(port: int, outer_port: int, lease_seconds: int, *, own: int = 0, result: int = 0) -> bytes:
    return struct.pack("!BBHIHHI", 0, 130, result, 7, own or port, outer_port and outer_port + 1000, lease_seconds)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router of these tests may be slow."""
    monkeypatch.setattr(router_ports, "TRIES_SECONDS", (0.25, 4.0))


@contextmanager
def _router(answer: Answer, asked: list[Request]) -> Iterator[tuple[str, int]]:
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
                if not is_first:
                    request, reply = answer(data)
                    if asked[-1:] != [request]:
                        asked.append(request)
                    sock.sendto(reply, sender)
                is_first = False

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield sock.getsockname()
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize(("protocol", "answer"), [(NatPmp, _nat_pmp(_grant)), (Pcp, _pcp)], ids=["NAT-PMP", "PCP"])
async def test_ports_are_forwarded_renewed_and_given_back(protocol: type[NatPmp] | type[Pcp], answer: Answer) -> None:
    asked: list[Request] = []
    clock = ManualClock()
    with _router(answer, asked) as address:
        ports = RouterPorts(clock, [protocol(address)])
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
    ("protocol", "answer"),
    [
        (NatPmp, _nat_pmp(lambda port, outer, lease: _grant(port, outer, lease, result=2))),
        (NatPmp, _nat_pmp(lambda port, outer, lease: _grant(port, outer, lease, own=1))),
        (NatPmp, _nat_pmp(lambda port, outer, lease: _grant(port, 0, lease))),
        (NatPmp, _nat_pmp(lambda port, outer, lease: b"\0\x82")),
        (Pcp, partial(_pcp, change=lambda reply: reply[:3] + b"\x02" + reply[4:])),
        (Pcp, partial(_pcp, change=lambda reply: reply[:24] + bytes(12) + reply[36:])),
        (Pcp, partial(_pcp, change=lambda reply: reply[:40] + b"\0\x01" + reply[42:])),
        (Pcp, partial(_pcp, change=lambda reply: reply[:-1])),
        (Pcp, lambda data: ((0, 0, 0), struct.pack("!BBHI", 0, 129, 1, 7))),
    ],
    ids=[
        "refused", "another port", "no port", "cut off", "PCP refused", "PCP another nonce", "PCP another port",
        "PCP cut off", "PCP another version",
    ],
)  # fmt: skip
async def test_a_refusal_or_nonsense_forwards_nothing(protocol: type[NatPmp] | type[Pcp], answer: Answer) -> None:
    with _router(answer, []) as address:
        ports = RouterPorts(ManualClock(), [protocol(address)])
        assert not await ports.ask([5001, 5002])
        assert not ports.outer


@pytest.mark.parametrize("version", [0, 2])
async def test_of_pcp_and_nat_pmp_the_one_that_the_router_speaks_forwards_the_ports(version: int) -> None:
    def answer(data: bytes) -> tuple[Request, bytes]:
        """As RFC 6887 (9) has it: an answer in the router's own version, with the result that it does not know this
        one."""
        if data[0] != version:
            return (0, 0, 0), struct.pack("!BBHI", version, 128 + data[1], 1, 7)
        return _pcp(data) if version else _nat_pmp(_grant)(data)

    with _router(answer, []) as address:
        ports = RouterPorts(ManualClock(), [Pcp(address), NatPmp(address)])
        assert await ports.ask([5001, 5002])
        assert ports.outer == {5001: 6001, 5002: 6002}
        if version:
            assert await ports.outer_host() == "11.0.0.7"
