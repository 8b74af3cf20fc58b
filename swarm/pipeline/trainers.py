"""The trainers that a leader hears of: which of them live and want work, and how much each may hold.

Used by leases alone. Trainers are told apart by name, but shares and bans go by bearer: one token, or in an open run
one address, may have any number of names, and all of them together are worth no more than one. Knows no microbatch.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from swarm.machine.clock import Clock

DOUBT_SECONDS = 1.5
"""Synchronous: a trainer that was not heard of for so long may have died. Another one that has nothing else to do gets
what it holds, since everybody would wait for that at the end of a round."""
KNOWN_SECONDS = 0.5
"""A trainer wants work if it asked for some so lately: trainers that have room ask all the time."""
LEAST_PATIENCE_SECONDS, FIRST_PATIENCE_SECONDS, MOST_PATIENCE_SECONDS = 20.0, 60.0, 600.0
"""A lease that is renewed for longer than this, without its microbatch being counted, goes to a trainer that has
nothing else to do. The first one holds before anything was measured."""
PATIENCE = 4.0
"""Likewise, so many times what a microbatch takes from its grant until it is counted."""
BAN_SECONDS, MOST_BAN_SECONDS = 20.0, 3600.0
"""How long a bearer gets nothing after another one has run what it held for too long; doubled each time."""
FORGIVEN_AFTER = 10.0
"""Once the end of a ban lies this many times its length back, the next one is a first one again."""
MAX_BANS = 4096
"""How many are remembered; older ones are forgotten."""


class Trainer(NamedTuple):
    """A trainer, as a leader tells it from others.

    Attributes:
        bearer: whose token the trainer has; in an open run, the trainer's address.
        trainer_id: what it calls itself.
    """

    bearer: str
    trainer_id: str


@dataclass(frozen=True)
class _Ban:
    seconds: float
    until: float


class Trainers:
    """What one leader knows of its trainers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard_at: dict[Trainer, float] = {}
        self._wanted_at: dict[Trainer, float] = {}
        self._bans: dict[str, _Ban] = {}
        self._times = deque[float](maxlen=64)

    def hear(self, trainer: Trainer) -> None:
        """The trainer has asked: so it lives, and renews all that it holds."""
        self._heard_at[trainer] = self._clock.monotonic()

    def note_wish(self, trainer: Trainer, *, wants: bool) -> None:
        """Whether it wants work that it may be given."""
        now = self._clock.monotonic()
        self._wanted_at = {other: at for other, at in self._wanted_at.items() if now - at <= KNOWN_SECONDS}
        if wants:
            self._wanted_at[trainer] = now

    def forget_silent(self, seconds: float, *, but: Collection[Trainer]) -> None:
        """Forget trainers that were not heard of for so long."""
        self._heard_at = {t: at for t, at in self._heard_at.items() if t in but or not self.is_silent(t, seconds)}

    def is_silent(self, trainer: Trainer, seconds: float) -> bool:
        """Whether it was not heard of for so long."""
        return self._clock.monotonic() - self._heard_at.get(trainer, -math.inf) >= seconds

    def wants(self, trainer: Trainer) -> bool:
        """Whether it has asked for work just now, and may be given some."""
        return trainer in self._wanted_at

    def rivals(self, trainer: Trainer) -> set[str]:
        """The other bearers of which some trainer wants work."""
        return {other.bearer for other in self._wanted_at} - {trainer.bearer}

    def num_parts(self, trainer: Trainer) -> int:
        """Among how many equal parts work is divided, if the trainer gets one of them."""
        return _num_parts(trainer, self._wanted_at.keys() | {trainer})

    def room(self, trainer: Trainer, size: int, held: Counter[Trainer]) -> int:
        """How many more microbatches a trainer may hold: all trainers that live, and hold some or want some, have equal
        shares of a round, whatever each of them asks for.

        Args:
            size: microbatches of a round.
            held: what each trainer holds.
        """
        if self.is_banned(trainer.bearer):
            return 0
        sharing = {t for t in held if not self.is_silent(t, DOUBT_SECONDS)} | self._wanted_at.keys() | {trainer}
        sharing = {other for other in sharing if other.bearer not in self._bans or not self.is_banned(other.bearer)}
        of_bearer = math.ceil(size / len({other.bearer for other in sharing}))
        of_trainer = math.ceil(size / _num_parts(trainer, sharing))
        held_by_bearer = sum(number for other, number in held.items() if other.bearer == trainer.bearer)
        return max(0, min(of_bearer - held_by_bearer, of_trainer - held[trainer]))

    # -- which of them make progress ---------------------------------------------------------------------------------

    def took(self, seconds: float) -> None:
        """A microbatch was counted so long after it was granted."""
        self._times.append(seconds)

    @property
    def patience_seconds(self) -> float:
        """How long a lease may be renewed while others have nothing else to do."""
        if not self._times:
            return FIRST_PATIENCE_SECONDS
        # The median: a bearer has a say in it only if most microbatches that are counted are its own.
        usual = PATIENCE * statistics.median(self._times)
        return min(MOST_PATIENCE_SECONDS, max(LEAST_PATIENCE_SECONDS, usual))

    def ban(self, bearer: str) -> None:
        """Give a bearer nothing for a while, as long as others are there."""
        now, last = self._clock.monotonic(), self._bans.pop(bearer, None)
        if last is not None and now < last.until:
            self._bans[bearer] = last
            return
        is_repeated = last is not None and now < last.until + FORGIVEN_AFTER * last.seconds
        seconds = min(MOST_BAN_SECONDS, 2.0 * last.seconds) if last is not None and is_repeated else BAN_SECONDS
        self._bans[bearer] = _Ban(seconds, now + seconds)
        if len(self._bans) > MAX_BANS:
            del self._bans[next(iter(self._bans))]

    def is_banned(self, bearer: str) -> bool:
        """Whether it gets nothing: others that are not banned are there to do it all."""
        if not self._is_under_ban(bearer):
            return False
        return any(
            not self._is_under_ban(other.bearer) and not self.is_silent(other, DOUBT_SECONDS)
            for other in self._heard_at
        )

    def _is_under_ban(self, bearer: str) -> bool:
        ban = self._bans.get(bearer)
        return ban is not None and self._clock.monotonic() < ban.until


def _num_parts(trainer: Trainer, sharing: Collection[Trainer]) -> int:
    """Bearers have equal parts, and so have the trainers of one bearer of what is theirs."""
    num_own = sum(other.bearer == trainer.bearer for other in sharing)
    return len({other.bearer for other in sharing}) * num_own
