"""Limits what a meeting point carries: connections and bytes per second, for each caller and in all.

Bytes that a caller sends beyond its share wait, which slows the connection down; connections beyond the limit are
refused. Carried bytes are counted. A caller is the bearer of a token, or an address, since there may be any number of
peer ids.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from swarm.machine.clock import Clock
from swarm.rpc.callers import Caller, Quota

BURST_SECONDS = 0.25
"""A caller may send at once the part of its share that it did not use within this time."""
RETRY_SECONDS = 5.0
"""How long a caller that was refused waits before it asks again."""


@dataclass(frozen=True, kw_only=True)
class MeetingLimits:
    """The most that a meeting point does for peers that others do not reach. One caller gets half of each number."""

    max_waiting: int = 128
    """Peers that may wait here at one time; 0 lets none wait."""
    max_connections: int = 256
    """Connections that are carried at one time."""
    bytes_per_second: float = 25e6
    """The rate at which all callers' bytes together are carried. Those that send at one moment have equal parts."""
    share_while_exchanging: float = 0.25
    """The share of `bytes_per_second` that callers may have while this peer averages: its own round comes first."""

    @classmethod
    def of(cls, megabits_per_second: int) -> "MeetingLimits":
        """The limits of a meeting point that may carry this many megabits per second; nothing for 0."""
        return cls(bytes_per_second=megabits_per_second * 125_000.0) if megabits_per_second else cls(max_waiting=0)


class Budget:
    """How much one meeting point carries."""

    def __init__(self, limits: MeetingLimits, clock: Clock, is_exchanging: Callable[[], bool]) -> None:
        self._limits = limits
        self._clock = clock
        self._is_exchanging = is_exchanging
        self._connections = Quota("connections", limits.max_connections, retry_seconds=RETRY_SECONDS)
        self._sent = Quota("seconds of the line", each=BURST_SECONDS, per_second=1.0, clock=clock)
        """A caller that has some of it counts as sending."""
        self.num_bytes = 0
        """How many bytes were carried since this peer began to serve its stage."""

    @property
    def num_connections(self) -> int:
        return int(self._connections.total)

    def connection(self, caller: Caller) -> AbstractContextManager[None]:
        """Counts a connection while the block runs. Raises Overloaded if there are too many."""
        return self._connections.taken(caller)

    async def spend(self, caller: Caller, num_bytes: int) -> None:
        """Wait until `num_bytes` of a caller may be passed on. Cancelling ends the wait."""
        senders = {caller, *self._sent.callers}
        share = self._limits.share_while_exchanging if self._is_exchanging() else 1.0
        rate = self._limits.bytes_per_second * share / len(senders)
        self.num_bytes += num_bytes
        if seconds := self._sent.wait_seconds(caller, num_bytes / rate):
            await self._clock.sleep(seconds)
