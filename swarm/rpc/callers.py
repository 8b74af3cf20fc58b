"""Identifies the caller of each call, and limits how much of this peer one caller may use.

In a locked run a caller is a member's id. In an open one it is an IP address, of IPv6 the first 64 bits, since a
provider gives a customer all addresses that begin with these; one that comes through a tunnel has a loopback address.
"""

import hashlib
import ipaddress
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NewType
from urllib.parse import unquote

from swarm.credentials import certificates
from swarm.credentials.authority import bearer_of
from swarm.errors import IntegrityError, Overloaded
from swarm.machine.clock import Clock, SystemClock
from swarm.rpc.endpoint import plain_ip_of

MAX_CALLS = 1024
"""The most calls of one caller under way at one time. An honest trainer has many, which mostly wait for answers."""
MAX_KEPT_BYTES = 256 << 20
"""The most bytes kept for the calls of one caller. Those of its microbatches may be more, and are counted apart."""
RETRY_SECONDS = 1.0
"""How long a caller with too many calls waits before it tries again."""
KEPT_RETRY_SECONDS = 0.05
"""How long a caller for which too many bytes are kept waits before it tries again. There is room as soon as one of its
calls has ended."""
CALLS_PER_SECOND = 500.0
"""Calls that one caller may begin in a second. Further ones wait, so that no caller keeps this peer busy by itself."""
BURST_CALLS = 1000
"""Calls that a caller may begin at once after a pause."""
WASTED_CALLS = 5
"""A call that was refused or broken off counts as this many calls. An honest caller is slowed by that only after
hundreds of them."""
ENTRIES_PER_CALL = 32
"""This many entries of the lists in a request take about as much time as one call."""
NETWORK_BITS = 64
"""The bits of an IPv6 address by which callers are distinguished."""
LONGEST_SECONDS = 10.0
"""The longest that a call waits for its turn. So a caller that keeps beginning and breaking off calls cannot delay an
honest one at the same address by more than this."""
MOST_BEGUN = BURST_CALLS + LONGEST_SECONDS * CALLS_PER_SECOND
"""The most of a caller's calls that count at one time."""
MOST_REMEMBERED = 4096
"""The most callers that a Quota remembers for what comes back by itself; those that took nothing for longest go."""

Caller = NewType("Caller", str)

_THIS_MACHINE = ("ipv4:127.", "ipv6:[::1]", "unix:")
"""How the addresses of this machine begin. In an open run all of its processes are one caller, and must not wait for
each other."""
OWN = Caller("this process")
"""This peer itself, which calls another block of its own (local.py). Nothing is counted of it, because tensors that it
passes on are kept only once."""
_handed_on: dict[str, str] = {}
"""For each loopback address from which a connection of somebody else is handed on (serving.py), who that is."""
_TUNNELLED = "127.77."
"""Callers that come through a meeting point have loopback addresses that begin like this. Each has an address of its
own."""


class Quota:
    """What callers have of something of which there is only so much. Each may have a share of it, and no more.

    It is a caller's until `give_back`; or, where a rate is given, until it has come back by itself.
    """

    def __init__(
        self, what: str, most: float = math.inf, *, each: float | None = None, retry_seconds: float = RETRY_SECONDS,
        per_second: float = 0.0, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            what: names it in refusals, in the plural.
            most: what all callers together may have.
            each: what one caller may have; half of `most` if left out. A caller that has nothing may always take what
                it needs at once, if it is there.
            retry_seconds: how long a caller that was refused waits before it tries again.
            per_second: how much comes back to each caller by itself, by `clock`.
        """
        self.most = most
        self.each = most / 2 if each is None else each
        self._what = what
        self._retry_seconds = retry_seconds
        self._per_second = per_second
        self._clock = clock or SystemClock()
        self._given = 0.0
        self._taken: dict[Caller, tuple[float, float]] = {}
        """What each caller had when it last took something, and when that was; the caller that took last is last."""

    @property
    def total(self) -> float:
        return sum(map(self.held, self._taken)) if self._per_second else self._given

    @property
    def callers(self) -> list[Caller]:
        return [caller for caller in self._taken if self.held(caller)]

    def held(self, caller: Caller) -> float:
        amount, at = self._taken.get(caller, (0.0, 0.0))
        return max(0.0, amount - (self._clock.monotonic() - at) * self._per_second) if self._per_second else amount

    def fits(self, caller: Caller, amount: float = 1) -> bool:
        held = self.held(caller)
        # What all have is added up only where that has a bound: there may be thousands of callers.
        has_room = self.most == math.inf or self.total + amount <= self.most
        return has_room and (not held or held + amount <= self.each)

    def take(self, caller: Caller, amount: float = 1) -> None:
        """Count something as the caller's. Raises Overloaded if it does not fit."""
        if not self.fits(caller, amount):
            is_own = self.total + amount <= self.most
            whose = f"this caller's {self.held(caller):.0f}" if is_own else f"{self.total:.0f}"
            fault = f"no room for more {self._what} beside {whose}" if self.most else f"this peer takes no {self._what}"
            raise Overloaded(fault, retry_after_seconds=self._retry_seconds)
        self._count(caller, amount)

    def wait_seconds(self, caller: Caller, amount: float, *, longest: float = math.inf) -> float:
        """Count something as the caller's though it may not fit, and return the seconds until it does.

        These are no more than `longest`; what would have to wait for longer is not counted.
        """
        most = self.each + longest * self._per_second
        self._count(caller, min(amount, most - self.held(caller)))
        return max(0.0, self.held(caller) - self.each) / self._per_second

    def give_back(self, caller: Caller, amount: float = 1) -> None:
        self._count(caller, -amount)

    @contextmanager
    def taken(self, caller: Caller, amount: float = 1) -> Iterator[None]:
        """Have something inside the block. Raises Overloaded if it does not fit."""
        self.take(caller, amount)
        try:
            yield
        finally:
            self.give_back(caller, amount)

    def _count(self, caller: Caller, amount: float) -> None:
        self._given += amount
        held = self.held(caller) + amount
        self._taken.pop(caller, None)
        if held > 0.0:
            self._taken[caller] = (held, self._clock.monotonic())
        while (
            self._per_second
            and self._taken
            and (not self.held(first := next(iter(self._taken))) or len(self._taken) > MOST_REMEMBERED)
        ):
            del self._taken[first]


class Callers:
    """Counts what each caller uses of this peer now: calls, and kept bytes."""

    def __init__(
        self, clock: Clock | None = None, *, max_calls: int = MAX_CALLS, max_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        """`max_bytes` is the most bytes kept for the microbatches of one caller, unless that is changed, and the most
        kept for its other calls."""
        self.num_begun = 0
        """How many calls have begun, of all callers."""
        self.calls = Quota("calls", each=max_calls)
        self.kept = {
            is_training: Quota("bytes", each=max_bytes, retry_seconds=KEPT_RETRY_SECONDS)
            for is_training in (True, False)
        }
        """Bytes kept for each caller: for its microbatches (True), and for its other calls (False)."""
        self._begun = Quota("calls in a second", each=BURST_CALLS, per_second=CALLS_PER_SECOND, clock=clock)

    def enter(self, caller: Caller, num_entries: int = 0) -> float:
        """Count a call that begins, until `leave`, and return the seconds that it has to wait because of the caller's
        earlier ones. Every ENTRIES_PER_CALL entries of the lists in its request count as one more call.

        Raises Overloaded if too many calls of the caller are under way, or if its earlier calls already wait so long
        that these entries cannot all be counted.
        """
        num_more = num_entries // ENTRIES_PER_CALL
        if num_more and self._begun.held(caller) + 1 + num_more > MOST_BEGUN:
            raise Overloaded(
                f"calls of this caller wait {LONGEST_SECONDS:.0f} s already", retry_after_seconds=RETRY_SECONDS
            )
        self.calls.take(caller)
        self.num_begun += 1
        return self._count(caller, 1 + num_more)

    def leave(self, caller: Caller, *, wasted: bool = False) -> None:
        """Count the end of a call. `wasted` says whether the call was refused or broken off."""
        self.calls.give_back(caller)
        if wasted:
            self._count(caller, WASTED_CALLS - 1)

    def _count(self, caller: Caller, num_calls: int) -> float:
        if caller.startswith(_THIS_MACHINE) and not caller.startswith(f"ipv4:{_TUNNELLED}"):
            return 0.0
        return self._begun.wait_seconds(caller, num_calls, longest=LONGEST_SECONDS)

    def keep(self, caller: Caller, num_bytes: int, *, training: bool = False) -> None:
        """Count bytes as kept for a call, until `release`. Raises Overloaded if that would be too much for one caller.
        Not raised if nothing is kept for this caller yet."""
        if caller != OWN:
            self.kept[training].take(caller, num_bytes)

    def release(self, caller: Caller, num_bytes: int, *, training: bool = False) -> None:
        if caller != OWN:
            self.kept[training].give_back(caller, num_bytes)

    @property
    def num_calls(self) -> int:
        return int(self.calls.total)

    @property
    def num_bytes(self) -> int:
        return int(sum(kept.total for kept in self.kept.values()))


def caller_of(context: Any) -> Caller:
    with suppress(IntegrityError):
        if shown := chain_of(context):
            return Caller(certificates.peer_id_of(shown))
    return _address_of(context)


def token_or_address_of(context: Any) -> Caller:
    """The token that the caller uses, whatever its key and id are; in an open run its address."""
    token = bearer_of(chain_of(context))
    return Caller(token) if token is not None else _address_of(context)


@contextmanager
def handed_on(peer: str) -> Iterator[socket.socket]:
    """A socket from which a connection of somebody else is handed on to a server of this process, inside the block.
    `peer` is who is at the other end, as `peer_of` is to give it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        sock.bind(("127.0.0.1", 0))
        here = f"ipv4:127.0.0.1:{sock.getsockname()[1]}"
        _handed_on[here] = peer
        try:
            yield sock
        finally:
            del _handed_on[here]


def peer_of(context: Any) -> str:
    """Where the call with this ServicerContext comes from: ipv4:192.0.2.1:5001 or ipv6:[2001:db8::1]:5001."""
    # gRPC writes the brackets with percent signs.
    seen = unquote(context.peer())
    return _handed_on.get(seen, seen)


def _address_of(context: Any) -> Caller:
    """The caller's address without its port: ipv4:192.0.2.1 or ipv6:[2001:db8:0:1::/64]."""
    address = peer_of(context).rpartition(":")[0]
    family, _, host = address.partition(":")
    ip = plain_ip_of(host.strip("[]")) if family == "ipv6" else None
    if ip is None or ip.is_loopback:
        return Caller(address)
    if ip.version == 4:
        return Caller(f"ipv4:{ip}")
    return Caller(f"ipv6:[{ipaddress.IPv6Network((int(ip), NETWORK_BITS), strict=False)}]")


def chain_of(context: Any) -> str:
    """The certificates that the caller showed, its own first; empty if it showed none. TLS has verified them."""
    shown = context.auth_context()
    parts = [*shown.get("x509_pem_cert", ()), *shown.get("x509_pem_cert_chain", ())]
    return "".join(part.decode(errors="replace") for part in parts)


def tunnel_source(caller: str) -> str:
    """The loopback address from which a caller that came through a tunnel is connected to this peer's own server.
    `caller` is the caller's identification, from the meeting point."""
    first, second = hashlib.sha256(caller.encode()).digest()[:2]
    return f"{_TUNNELLED}{first}.{second}"


def is_tunnelled(host: str) -> bool:
    return host.startswith(_TUNNELLED)
