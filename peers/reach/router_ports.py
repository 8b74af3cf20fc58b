"""Asks this machine's router to forward TCP ports to it: by PCP (RFC 6887), NAT-PMP (RFC 6886), or else by UPnP.

A forwarding has a lease, which is renewed. A router's answer is a claim like any other: an endpoint is announced only
once others have reached it, but for the first peer of a run, whom nobody can dial back yet.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Never, Protocol, TypeVar

from swarm.machine.clock import Clock
from swarm.rpc.endpoint import ip_of

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LEASE_SECONDS = 1200
"""How long a forwarding lasts unless it is renewed; a killed peer's forwarding stays for at most this long."""
RENEW_SECONDS = 400.0
ASK_SECONDS = 5.0
"""The longest wait for the router's answer to one call."""
TRIES_SECONDS = (0.25, 0.5)
"""How long to wait for an answer after each of two datagrams: the first two waits of RFC 6886."""
_PORT, _ANSWER = 5351, 128
"""The port at which a router answers PCP and NAT-PMP, and what it adds to the number of an operation."""
_OUTER_HOST, _MAP_TCP = 0, 2
"""Operations of NAT-PMP."""
_PCP, _PCP_MAP, _PCP_TCP = 2, 1, 6
"""PCP's version, its operation that forwards a port, and its number of TCP."""
_ROUTES = Path("/proc/net/route")
_IS_GATEWAY = 0x2
_UPNP_MILLISECONDS = 1000
"""How long routers may take to answer a search for UPnP."""


class Router(Protocol):
    """A router that forwards ports. All methods block for some seconds at most, and raise OSError if it refuses."""

    def forward(self, port: int, outer_port: int, lease_seconds: int) -> int:
        """Forward a router's port to `port` of this machine. Return the router's port: `outer_port` if that is free."""

    def end(self, port: int, outer_port: int) -> None: ...

    def outer_host(self) -> str:
        """The router's IPv4 address outside, as it says."""


def _exchange(address: tuple[str, int], request: Callable[[str], bytes]) -> bytes:
    """The router's answer to a datagram, which is made for this machine's address. Raises OSError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # A connected socket receives only the router's datagrams.
        sock.connect(address)
        for seconds in TRIES_SECONDS:
            sock.settimeout(seconds)
            sock.send(request(sock.getsockname()[0]))
            with contextlib.suppress(TimeoutError):
                return sock.recv(1100)
    raise OSError("the router does not answer by PCP or NAT-PMP")


class Pcp:
    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._nonce = os.urandom(12)
        """Shows the router that a renewal is this peer's. One that was forwarded with another nonce is refused."""
        self._outer_host = ""

    def forward(self, port: int, outer_port: int, lease_seconds: int) -> int:
        def request(own_host: str) -> bytes:
            header = struct.pack("!BBHI", _PCP, _PCP_MAP, 0, lease_seconds) + _mapped(own_host)
            return header + self._nonce + struct.pack("!BxxxHH", _PCP_TCP, port, outer_port) + _mapped("0.0.0.0")

        reply = _exchange(self._address, request)
        if len(reply) < 60 or reply[:2] != bytes([_PCP, _ANSWER + _PCP_MAP]) or reply[3] != 0:
            raise OSError(f"the router refuses by PCP, with {reply[:4].hex()}")
        protocol, own_port, granted = struct.unpack("!BxxxHH", reply[36:44])
        if (reply[24:36], protocol, own_port) != (self._nonce, _PCP_TCP, port):
            raise OSError("the router answers another request by PCP")
        self._outer_host = socket.inet_ntoa(reply[56:60])
        return int(granted)

    def outer_host(self) -> str:
        """The address outside, by the newest forwarding."""
        return self._outer_host

    def end(self, port: int, outer_port: int) -> None:
        self.forward(port, 0, 0)


def _mapped(host: str) -> bytes:
    """An IPv4 address as PCP has it, in 16 bytes."""
    return bytes(10) + b"\xff\xff" + socket.inet_aton(host)


class NatPmp:
    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    def forward(self, port: int, outer_port: int, lease_seconds: int) -> int:
        request = struct.pack("!BBHHHI", 0, _MAP_TCP, 0, port, outer_port, lease_seconds)
        return _granted(_exchange(self._address, lambda _: request), port)

    def outer_host(self) -> str:
        reply = _exchange(self._address, lambda _: struct.pack("!BB", 0, _OUTER_HOST))
        if len(reply) < 12 or reply[:4] != struct.pack("!BBH", 0, _ANSWER + _OUTER_HOST, 0):
            raise OSError("the router does not tell its address by NAT-PMP")
        return socket.inet_ntoa(reply[8:12])

    def end(self, port: int, outer_port: int) -> None:
        self.forward(port, 0, 0)


def _granted(reply: bytes, port: int) -> int:
    """The outer port in an answer. Raises OSError if the router refuses, or if the answer makes no sense."""
    if len(reply) < 16:
        raise OSError("the router refuses by NAT-PMP")
    version, operation, result, _, own_port, outer_port, _ = struct.unpack("!BBHIHHI", reply[:16])
    if (version, operation, result, own_port) != (0, _ANSWER + _MAP_TCP, 0, port):
        raise OSError(f"the router refuses by NAT-PMP, with result {result}")
    return int(outer_port)


class Upnp:
    def __init__(self) -> None:
        self._gateway: Any = None

    def forward(self, port: int, outer_port: int, lease_seconds: int) -> int:
        self._ask(lambda by: by.addportmapping(outer_port, "TCP", by.lanaddr, port, "swarm", "", lease_seconds))
        return outer_port

    def end(self, port: int, outer_port: int) -> None:
        self._ask(lambda by: by.deleteportmapping(outer_port, "TCP"))

    def outer_host(self) -> str:
        return str(self._ask(lambda by: by.externalipaddress()))

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        try:
            if self._gateway is None:
                import miniupnpc

                gateway = miniupnpc.UPnP()
                gateway.discoverdelay = _UPNP_MILLISECONDS
                gateway.discover()
                gateway.selectigd()
                self._gateway = gateway
            return call(self._gateway)
        except Exception as error:  # noqa: BLE001 - miniupnpc raises nothing more exact.
            raise OSError(f"the router refuses by UPnP: {error}") from None


def own_routers() -> list[Router]:
    gateway = default_gateway(_ROUTES.read_text()) if _ROUTES.exists() else None
    return [Upnp()] if gateway is None else [Pcp((gateway, _PORT)), NatPmp((gateway, _PORT)), Upnp()]


def default_gateway(routes: str) -> str | None:
    """The address of the IPv4 default gateway, from Linux's routing table; None if there is none."""
    for line in routes.splitlines()[1:]:
        _, destination, gateway, flags, *_ = line.split()
        if int(destination, 16) == 0 and int(flags, 16) & _IS_GATEWAY:
            return socket.inet_ntoa(struct.pack("=I", int(gateway, 16)))
    return None


class RouterPorts:
    def __init__(self, clock: Clock, routers: Sequence[Router]) -> None:
        """`routers` are asked in this order until one forwards all ports."""
        self._clock = clock
        self._routers = routers
        self._router: Router | None = None
        self.outer: dict[int, int] = {}
        """The router's port for each port of this machine that is forwarded now."""

    async def ask(self, ports: Sequence[int]) -> bool:
        """Ask for the forwarding of all of these ports, or of none. Return whether they are forwarded. If this is
        cancelled, a call to the router still ends by itself in its thread."""
        for router in self._routers:
            self._router = router
            if await self._forward(ports):
                logger.info("the router forwards ports to this peer: %s", ", ".join(map(str, self.outer.values())))
                return True
            await self.release()
        return False

    async def outer_host(self) -> str | None:
        """The public address of the router that forwards the ports, as it says; None if it names none."""
        assert self._router is not None
        host = await _in_time(self._router.outer_host)
        ip = None if host is None else ip_of(host)
        return host if ip is not None and ip.is_global else None

    async def keep(self) -> Never:
        while True:
            await self._clock.sleep(RENEW_SECONDS)
            if not await self._forward(list(self.outer)):
                logger.warning("the router does not renew the forwarding of this peer's ports")

    async def release(self) -> None:
        outer, self.outer = self.outer, {}
        for port, outer_port in outer.items():
            assert self._router is not None
            await _in_time(self._router.end, port, outer_port)

    async def _forward(self, ports: Sequence[int]) -> bool:
        assert self._router is not None
        for port in ports:
            granted = await _in_time(self._router.forward, port, self.outer.get(port, port), LEASE_SECONDS)
            if granted is None or not 0 < granted < 65536:
                return False
            self.outer[port] = granted
        return True


async def _in_time(call: Callable[..., Result], *arguments: int) -> Result | None:
    """The result of a call to the router; None if the router refuses or takes too long."""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            return await asyncio.to_thread(call, *arguments)
    except (OSError, TimeoutError) as error:
        logger.debug("no forwarding: %s", error or "the router does not answer")
        return None
