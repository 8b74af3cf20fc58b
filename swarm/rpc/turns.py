"""Gives turns to the peers that download from this one: one at a time, and while it trains with a part of the line.

If downloads share a line, each takes as long as all together. One after the other, all but the last end sooner, and a
peer that has its state is a donor for the others.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from swarm.errors import Overloaded
from swarm.machine.clock import Clock
from swarm.rpc.callers import Caller

SHARE = 0.5
"""The share of the time in which a download may have the line while this peer trains."""
LONGEST_PAUSE_SECONDS = 5.0
"""The longest pause between two pieces. A donor that says nothing for 15 s is taken for dead."""
HOLD_SECONDS = 3.0
"""How long a turn lasts without a call: the peer that downloads checks a piece before it asks for the next one."""
TURN_SECONDS = 600.0
"""The longest turn while others wait: a peer that downloads slowly, or pretends to, must not hold them up for ever."""
RETRY_SECONDS = 1.0
"""The time after which a peer that waits for its turn asks again."""
KEPT_SECONDS = 5.0
"""A peer that waits for its turn keeps its place for this long without asking."""
MOST_WAITING = 128
"""The most peers that wait; half of them may be one caller's."""
YIELD_SECONDS = 5.0
"""How long a piece waits at most for an exchange under way here, which needs the line first. The peer that downloads
waits three times as long for the next piece before it gives the donor up."""
YIELD_LOOK_SECONDS = 0.1


async def yield_to_exchange(is_exchanging: Callable[[], bool], clock: Clock) -> None:
    """Wait while this peer exchanges, but no longer than YIELD_SECONDS."""
    until = clock.monotonic() + YIELD_SECONDS
    while is_exchanging() and clock.monotonic() < until:
        await clock.sleep(YIELD_LOOK_SECONDS)


NOBODY = Caller("")
_Peer = tuple[Caller, str]
"""A peer that downloads, after the one who answers for it."""


@dataclass(eq=False)
class Turns:
    clock: Clock
    is_training: Callable[[], bool]
    """Whether this peer has work under way, which needs the line first."""
    _holder: _Peer | None = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)
    """When the holder's turn began."""
    _num_calls: int = field(default=0, init=False)
    """The number of the holder's calls under way."""
    _used_at: float = field(default=-HOLD_SECONDS, init=False)
    _piece_began_at: float | None = field(default=None, init=False)
    _waiting: dict[_Peer, float] = field(default_factory=dict, init=False)
    """The peers that wait, in the order in which they came, and when each last asked."""

    @asynccontextmanager
    async def turn(self, who: str, caller: Caller = NOBODY) -> AsyncIterator[None]:
        """Give one piece to `who` inside the block, after a pause if this peer trains.

        Args:
            caller: who answers for that peer: the bearer of its token, or its address. Callers have turns in turn, so
                one that makes up peers holds up another caller by one of them at a time.

        Raises:
            Overloaded: it is another peer's turn. The message gives the number of downloads that come first.
        """
        now, peer = self.clock.monotonic(), (caller, who)
        if peer != self._holder or self._is_over(now):
            self._take(peer, now)
        self._num_calls += 1
        try:
            await self._pause(now)
            self._piece_began_at = self.clock.monotonic()
            yield
        finally:
            if peer == self._holder:
                self._num_calls = max(0, self._num_calls - 1)
                self._used_at = self.clock.monotonic()

    def _take(self, peer: _Peer, now: float) -> None:
        """Begin a peer's turn; if others come first, keep a place for it and raise Overloaded."""
        self._waiting = {other: at for other, at in self._waiting.items() if now - at < KEPT_SECONDS}
        is_held = peer != self._holder and not self._is_over(now)
        if peer in self._waiting or self._has_place(peer[0]):
            self._waiting[peer] = now
        order = self._order()
        place = order.index(peer) if peer in self._waiting else len(order)
        if not is_held and place == 0:
            self._waiting.pop(peer, None)
            if peer != self._holder:
                self._holder, self._num_calls, self._piece_began_at = peer, 0, None
            self._since = now
            return
        first = place + is_held
        raise Overloaded(
            f"{first} other{'' if first == 1 else 's'} download{'s' if first == 1 else ''} first",
            retry_after_seconds=RETRY_SECONDS,
        )

    def _has_place(self, caller: Caller) -> bool:
        num_own = sum(other == caller for other, _ in self._waiting)
        return len(self._waiting) < MOST_WAITING and num_own < MOST_WAITING // 2

    def _order(self) -> list[_Peer]:
        """Those that wait, in the order of their turns: the first peers of all callers, then their second ones, and so
        on. The peer that had the last turn counts as its caller's first."""
        num_before = Counter[Caller]() if self._holder is None else Counter([self._holder[0]])
        ranks = dict[_Peer, int]()
        for peer in self._waiting:
            ranks[peer] = num_before[peer[0]]
            num_before[peer[0]] += 1
        return sorted(self._waiting, key=lambda peer: ranks[peer])

    def _is_over(self, now: float) -> bool:
        """Whether the holder has stopped, or has had its time."""
        has_stopped = not self._num_calls and now - self._used_at >= HOLD_SECONDS
        return has_stopped or now - self._since >= TURN_SECONDS

    async def _pause(self, now: float) -> None:
        """Leave the line to training for a while, in proportion to how long the piece before took."""
        if self._piece_began_at is not None and self.is_training():
            seconds = (now - self._piece_began_at) * (1.0 - SHARE) / SHARE
            await self.clock.sleep(min(seconds, LONGEST_PAUSE_SECONDS))
