"""The trainers that ask a leader for work: which of them are alive and want work, and how much each may hold.

Shares and pauses go by bearer, that is by token, or by address in an open run: a bearer may use any number of names,
but together these get no more than one would.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from swarm.machine.clock import Clock

DOUBT_SECONDS = 1.5
"""Synchronous: a trainer that has been silent for this long may have died. Its microbatches go to another trainer that
has nothing else to do, because at the end of a round all trainers would wait for them."""
KNOWN_SECONDS = 0.5
"""A trainer that asked for work within this time counts as wanting some: trainers with room ask all the time."""
LEAST_PATIENCE_SECONDS, FIRST_PATIENCE_SECONDS, MOST_PATIENCE_SECONDS = 20.0, 60.0, 600.0
"""If a lease is renewed for longer than a certain time, the patience, and its microbatch is still not counted, the
microbatch goes to a trainer that has nothing else to do. These are the least patience, the one before any measurement,
and the most."""
PATIENCE = 4.0
"""The patience, in multiples of the time that a microbatch takes from its grant until it is counted."""
PAUSE_SECONDS, MOST_PAUSE_SECONDS = 20.0, 3600.0
"""How long a bearer gets nothing after it held microbatches for too long and another bearer has run them. Doubled each
time."""
FORGIVEN_AFTER = 10.0
"""Once a pause has been over for this many times its length, the bearer's next one is as short as a first one."""
MAX_PAUSES = 4096


class Trainer(NamedTuple):
    """What identifies a trainer: its token, or in an open run its address, and the id that it gives itself."""

    bearer: str
    trainer_id: str


@dataclass(frozen=True)
class _Pause:
    seconds: float
    until: float


class Trainers:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard_at: dict[Trainer, float] = {}
        self._wishes: dict[Trainer, tuple[float, frozenset[int]]] = {}
        """When a trainer has last asked for work, and of which paths."""
        self._pauses: dict[str, _Pause] = {}
        self._times = deque[float](maxlen=64)

    def hear(self, trainer: Trainer) -> None:
        self._heard_at[trainer] = self._clock.monotonic()

    def note_wish(self, trainer: Trainer, paths: Iterable[int]) -> None:
        now, wanted = self._clock.monotonic(), frozenset(paths)
        self._wishes = {other: wish for other, wish in self._wishes.items() if now - wish[0] <= KNOWN_SECONDS}
        if wanted:
            self._wishes[trainer] = now, wanted

    def forget_silent(self, seconds: float, *, but: Collection[Trainer]) -> None:
        self._heard_at = {t: at for t, at in self._heard_at.items() if t in but or not self.is_silent(t, seconds)}

    def is_silent(self, trainer: Trainer, seconds: float) -> bool:
        return self._clock.monotonic() - self._heard_at.get(trainer, -math.inf) >= seconds

    def wants(self, trainer: Trainer, path: int) -> bool:
        return trainer in self._wishes and path in self._wishes[trainer][1]

    def rivals(self, trainer: Trainer, path: int) -> set[str]:
        return {other.bearer for other in self._wishes if self.wants(other, path)} - {trainer.bearer}

    def num_parts(self, trainer: Trainer) -> int:
        """The number of equal parts into which work is divided; the trainer gets one of them."""
        return _num_parts(trainer, self._wishes.keys() | {trainer})

    def room(self, trainer: Trainer, size: int, held: Counter[Trainer]) -> int:
        """How many more of a round's `size` microbatches a trainer may hold.

        A round is shared equally between the bearers that have live trainers which hold or want microbatches, and each
        bearer's share between its trainers, whatever any of them asks for.
        """
        if self.is_paused(trainer.bearer):
            return 0
        sharing = {t for t in held if not self.is_silent(t, DOUBT_SECONDS)} | self._wishes.keys() | {trainer}
        sharing = {other for other in sharing if other.bearer not in self._pauses or not self.is_paused(other.bearer)}
        of_bearer = math.ceil(size / len({other.bearer for other in sharing}))
        of_trainer = math.ceil(size / _num_parts(trainer, sharing))
        held_by_bearer = sum(number for other, number in held.items() if other.bearer == trainer.bearer)
        return max(0, min(of_bearer - held_by_bearer, of_trainer - held[trainer]))

    # -- which trainers make progress --------------------------------------------------------------------------------

    def took(self, seconds: float) -> None:
        self._times.append(seconds)

    @property
    def patience_seconds(self) -> float:
        """How long a lease may be renewed while other trainers have nothing else to do."""
        if not self._times:
            return FIRST_PATIENCE_SECONDS
        # It is the median, so that a bearer can only move it if most counted microbatches are its own.
        usual = PATIENCE * statistics.median(self._times)
        return min(MOST_PATIENCE_SECONDS, max(LEAST_PATIENCE_SECONDS, usual))

    def pause(self, bearer: str) -> None:
        """Give a bearer nothing for a while, as long as others are there."""
        now, last = self._clock.monotonic(), self._pauses.pop(bearer, None)
        if last is not None and now < last.until:
            self._pauses[bearer] = last
            return
        is_repeated = last is not None and now < last.until + FORGIVEN_AFTER * last.seconds
        seconds = min(MOST_PAUSE_SECONDS, 2.0 * last.seconds) if last is not None and is_repeated else PAUSE_SECONDS
        self._pauses[bearer] = _Pause(seconds, now + seconds)
        if len(self._pauses) > MAX_PAUSES:
            del self._pauses[next(iter(self._pauses))]

    def is_paused(self, bearer: str) -> bool:
        """Whether a bearer gets nothing, because it has a pause, and a bearer without one is there."""
        if not self._has_pause(bearer):
            return False
        return any(
            not self._has_pause(other.bearer) and not self.is_silent(other, DOUBT_SECONDS) for other in self._heard_at
        )

    def _has_pause(self, bearer: str) -> bool:
        pause = self._pauses.get(bearer)
        return pause is not None and self._clock.monotonic() < pause.until


def _num_parts(trainer: Trainer, sharing: Collection[Trainer]) -> int:
    """The number of parts into which work is divided. Bearers get equal parts, which are divided between their
    trainers."""
    num_own = sum(other.bearer == trainer.bearer for other in sharing)
    return len({other.bearer for other in sharing}) * num_own
