"""Limits the sessions of a stage peer, in all and for each caller.

Used by stage/generation. When a session begins, memory is counted for all positions that it may get, so that no session
ends for lack of memory.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swarm.errors import Overloaded
from swarm.rpc.callers import Caller, subtract

RETRY_SECONDS = 1.0
"""How long a caller that was refused waits before it tries again."""


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """The most that sessions may use of a peer. One caller gets at most half of each limit, or one session."""

    max_sessions: int = 64
    """Sessions at once, including those for which the peer only stands by; with 0 it takes none."""
    max_bytes: int = 1 << 30
    """The bytes for the texts' keys and values, and for the hidden states that are kept of them."""
    max_seconds: float = 600.0
    """A longer session has to begin again, at this peer or another one."""


class Places:
    """The places that are taken."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._num_sessions: Counter[Caller] = Counter()
        self._num_bytes: Counter[Caller] = Counter()

    def __len__(self) -> int:
        return self._num_sessions.total()

    @contextmanager
    def taken(self, caller: Caller, num_bytes: int) -> Iterator[None]:
        """Reserve a place for a session while the block runs. Raises Overloaded if there is no room."""
        self._require_room(caller, num_bytes)
        self._num_sessions[caller] += 1
        self._num_bytes[caller] += num_bytes
        try:
            yield
        finally:
            subtract(self._num_sessions, caller, 1)
            subtract(self._num_bytes, caller, num_bytes)

    def _require_room(self, caller: Caller, num_bytes: int) -> None:
        most_sessions, most_bytes = self._limits.max_sessions, self._limits.max_bytes
        if most_sessions == 0:
            raise Overloaded("this peer takes no sessions", retry_after_seconds=10 * RETRY_SECONDS)
        for name, present, more, most in (
            ("sessions", len(self), 1, most_sessions),
            ("sessions of one caller", self._num_sessions[caller], 1, max(1, most_sessions // 2)),
            ("bytes of sessions", self._num_bytes.total(), num_bytes, most_bytes),
            ("bytes of one caller's sessions", self._num_bytes[caller], num_bytes, most_bytes // 2),
        ):
            # A single session may take all of the memory.
            if present + more > most and (len(self) or num_bytes > most_bytes):
                raise Overloaded(f"there is no room for more than {most} {name}", retry_after_seconds=RETRY_SECONDS)
