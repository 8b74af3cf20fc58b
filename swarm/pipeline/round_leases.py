"""The leases of a synchronous round: which trainer holds which microbatch, has acknowledged it, or has held it for too
long.

A trainer holds only microbatches that it was granted. None can prove what a dead leader has granted it. But if trainers
were not believed, work of honest ones would be done twice. So while a new leader gathers, each bearer's claims are
believed up to its share of the round. No share is the whole round, and bearers that claim less come first.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass

from swarm.config import RunConfig
from swarm.machine.clock import Clock
from swarm.pipeline.trainers import Trainer, Trainers


@dataclass(frozen=True)
class Wish:
    """What a trainer asks for: up to `most` microbatches of these paths, of each at most as many as it is named."""

    trainer: Trainer
    paths: Sequence[int]
    most: int


@dataclass
class Lease:
    trainer: Trainer
    granted_at: float
    is_replay: bool
    has_arrived: bool
    """Whether the trainer is known to have received the grant. (The answer with the grant may be lost.)"""


@dataclass(frozen=True)
class Finished:
    """A microbatch that a trainer held and does not hold any more, but did not give back."""

    trainer: Trainer
    at: float
    """When the trainer stopped holding it."""
    was_replay: bool = False


@dataclass(frozen=True)
class _Claim:
    """The microbatches that an earlier leader has granted to a trainer, by the trainer's own account."""

    holding: frozenset[int]
    acknowledged: frozenset[int]

    @property
    def size(self) -> int:
        return len(self.holding | self.acknowledged)


class RoundLeases:
    """The leases of a round of one block, while this peer leads it."""

    def __init__(self, config: RunConfig, number: int, trainers: Trainers, clock: Clock) -> None:
        self.number = number
        self.ids: Collection[int] = ()
        self._path_of = config.path_of
        self.leases: dict[int, Lease] = {}
        self.finished: dict[int, Finished] = {}
        self._trainers = trainers
        self._clock = clock
        self._granted: dict[int, Lease] = {}
        """Each microbatch's last lease, whether it has ended or not."""
        self._counted: set[int] = set()
        self._times = Counter[tuple[int, str]]()
        """How often a bearer has had a microbatch."""
        self._overdue: dict[int, str] = {}
        """By microbatch: the bearer that held it for too long, as long as no other trainer has got it done."""
        self._claims: dict[Trainer, _Claim] = {}

    def room(self, trainer: Trainer) -> int:
        return self._trainers.room(trainer, len(self.ids), Counter(lease.trainer for lease in self.leases.values()))

    def give(self, trainer: Trainer, microbatch: int, *, is_replay: bool, has_arrived: bool) -> None:
        now = self._clock.monotonic()
        lease = Lease(trainer, granted_at=now, is_replay=is_replay, has_arrived=has_arrived)
        self.leases[microbatch] = self._granted[microbatch] = lease
        self._times[microbatch, trainer.bearer] += 1

    def was_given(self, trainer: Trainer, microbatch: int) -> bool:
        granted = self._granted.get(microbatch)
        return granted is not None and granted.trainer == trainer

    def renew(
        self, trainer: Trainer, holding: Collection[int], released: Collection[int], acknowledged: Collection[int]
    ) -> None:
        """Renew the leases that a trainer still holds. End its other leases, as given back or as acknowledged."""
        now = self._clock.monotonic()
        for microbatch, lease in [(m, lease) for m, lease in self.leases.items() if lease.trainer == trainer]:
            if microbatch in released:
                del self.leases[microbatch]
            elif microbatch in holding:
                lease.has_arrived = True
            else:
                del self.leases[microbatch]
                # If the grant never arrived, the microbatch still has to be run, at all stages.
                if lease.has_arrived or microbatch in acknowledged:
                    self.finished[microbatch] = Finished(trainer, now, lease.is_replay)
        for microbatch in holding:
            # The lease may have expired while the trainer was silent, or its grant may have been taken for lost.
            if microbatch not in self.leases and self.was_given(trainer, microbatch):
                self.leases[microbatch] = self._granted[microbatch]
                self.leases[microbatch].has_arrived = True

    # -- what an earlier leader has granted --------------------------------------------------------------------------

    def note_claim(self, trainer: Trainer, holding: Collection[int], acknowledged: Collection[int]) -> None:
        """Replace a trainer's earlier claim. All trainers of one bearer together can claim no more than the round: a
        claim that exceeds this is dropped."""
        claim = _Claim(*(frozenset(m for m in told if m in self.ids) for told in (holding, acknowledged)))
        others = sum(c.size for other, c in self._claims.items() if other.bearer == trainer.bearer and other != trainer)
        if claim.size and others + claim.size <= len(self.ids):
            self._claims[trainer] = claim
        else:
            self._claims.pop(trainer, None)

    def believe_claims(self, committed: Set[int], *, is_replay: bool, at: float) -> None:
        """Begin the leases that trainers claim to hold, and note the microbatches that they claim to have acknowledged
        (at the time `at`), up to each bearer's share. What is committed needs no claim."""
        by_bearer = Counter[str]()
        for trainer, claim in self._claims.items():
            by_bearer[trainer.bearer] += claim.size
        # No bearer is believed to hold a whole round. Otherwise a trainer that is about to ask would get nothing.
        left = dict.fromkeys(by_bearer, math.ceil(len(self.ids) / max(2, len(by_bearer))))
        known = self.leases.keys() | self.finished.keys() | committed
        for trainer, claim in sorted(self._claims.items(), key=lambda item: (by_bearer[item[0].bearer], item[0])):
            believed = sorted((claim.holding | claim.acknowledged) - known)[: left[trainer.bearer]]
            left[trainer.bearer] -= len(believed)
            known |= set(believed)
            for microbatch in believed:
                if microbatch in claim.holding:
                    self.give(trainer, microbatch, is_replay=is_replay, has_arrived=True)
                else:
                    self.finished[microbatch] = Finished(trainer, at)
        self._claims.clear()

    # -- how leases end ----------------------------------------------------------------------------------------------

    def note_committed(self, committed: Set[int]) -> None:
        """End the leases of microbatches that some member has committed, and note how long these took."""
        now = self._clock.monotonic()
        # This is done now, because members may have forgotten what they committed when a dead trainer's lease expires.
        for microbatch in self.leases.keys() & committed:
            lease = self.leases.pop(microbatch)
            self.finished[microbatch] = Finished(lease.trainer, now, lease.is_replay)
        for microbatch in committed - self._counted:
            self._counted.add(microbatch)
            held_too_long_by = self._overdue.pop(microbatch, None)
            if (granted := self._granted.get(microbatch)) is None:
                continue
            self._trainers.took(now - granted.granted_at)
            if held_too_long_by is not None and held_too_long_by != granted.trainer.bearer:
                self._pause([held_too_long_by])

    def note_ended(self) -> None:
        """Pause bearers that held microbatches too long: the stage is at another round, so others have run these."""
        self._pause(self._overdue.values())

    def end_silent(self, seconds: float) -> bool:
        """End the leases of trainers that have been silent for `seconds`; returns whether there were any."""
        ended = [m for m, lease in self.leases.items() if self._trainers.is_silent(lease.trainer, seconds)]
        for microbatch in ended:
            del self.leases[microbatch]
        self._trainers.forget_silent(seconds, but={lease.trainer for lease in self.leases.values()})
        return bool(ended)

    def end_overdue(self, asker: Trainer) -> bool:
        """End leases that trainers other than `asker` have renewed for too long; returns whether there were any.

        Their bearers are paused only once another trainer has run these microbatches: perhaps everything stands still.
        """
        since = self._clock.monotonic() - self._trainers.patience_seconds
        ended = [m for m, lease in self.leases.items() if lease.trainer != asker and lease.granted_at < since]
        for microbatch in ended:
            self._overdue.setdefault(microbatch, self.leases.pop(microbatch).trainer.bearer)
        return bool(ended)

    def _pause(self, bearers: Iterable[str]) -> None:
        for bearer in set(bearers):
            self._trainers.pause(bearer)
            for microbatch in [m for m, lease in self.leases.items() if lease.trainer.bearer == bearer]:
                del self.leases[microbatch]

    def allowed(self, wish: Wish, microbatches: Sequence[int]) -> list[int]:
        """The first microbatches that are wanted and that the trainer may have, because no other trainer that wants
        them comes first.

        A replay first goes to the trainer that ran the microbatch, which knows the peers that need not compute it
        again. If that fails, the others follow, first the bearers that have had it less often.
        """
        trainer, left = wish.trainer, Counter(wish.paths)
        rivals = {path: self._trainers.rivals(trainer, path) for path in left}

        def is_allowed(microbatch: int, path: int) -> bool:
            finished = self.finished.get(microbatch)
            if finished is not None and not finished.was_replay:
                if finished.trainer == trainer:
                    return True
                if self._trainers.wants(finished.trainer, path):
                    return False
            times = self._times[microbatch, trainer.bearer]
            return all(self._times[microbatch, rival] >= times for rival in rivals[path])

        found = list[int]()
        for microbatch in microbatches:
            path = self._path_of(microbatch)
            if len(found) < wish.most and left[path] and is_allowed(microbatch, path):
                found.append(microbatch)
                left[path] -= 1
        return found
