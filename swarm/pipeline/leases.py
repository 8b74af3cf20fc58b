"""Leases: which trainer runs which microbatches.

The leader of a stage's group grants them: stage 0's leader hands out new microbatches, any stage's leader the
ones that its stage has lost (synchronous setting). A lease expires unless its trainer renews it, so a dead
trainer's microbatches go to another. `LeaseTable` decides and is pure; lease_service
carries its answers.
"""

import math
import random
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass

from swarm.clock import Clock
from swarm.config import RunConfig
from swarm.rpc.bounds import LARGEST

LEASE_SECONDS = 8.0
"""Lifetime of a lease that is not renewed. An Ack of its trainer may be under way for longer. Synchronous: should it
count all the same, after another trainer ran the microbatch as well, one of the two is taken out, as where two trainers
hold one lease; with DiLoCo nobody else ever runs it."""
DOUBT_SECONDS = 1.5
"""Synchronous: a trainer that was not heard of for so long may have died. Another one that has nothing else to do gets
what it holds, since everybody would wait for that at the end of a round."""
GATHER_SECONDS = 1.0
"""For how long whoever takes the lead grants nothing of a synchronous round: trainers renew their leases twice as
often, so it knows then what they hold. Trainers have enough to do meanwhile."""
LONGEST_GATHER_SECONDS = 5.0
"""Likewise, if a peer of the stage has not told yet what it has."""
SETTLE_SECONDS = 0.75
"""How long a stage must have seen no change before a microbatch that it lacks is called missing."""
LONGEST_QUIET_SECONDS = 20.0
"""Likewise, where a peer of the stage has not told what it has."""
SHOWN_SECONDS = 1.5
"""How long it may take, while a round goes on, until a microbatch that its trainer is done with shows as committed."""
LOST_SECONDS = LEASE_SECONDS
"""What does not show as committed for so long after its Ack is lost, even while the round goes on. Lines stall for some
seconds, and a member waits as long for a retry."""
KNOWN_SECONDS = 0.5
"""A replay is left to the trainer that ran the microbatch, which knows where most of it need not be computed again,
while that trainer asked for work so lately: trainers that have room ask all the time."""
LEAST_SKIP, MOST_SKIP = 1 << 12, 1 << 30
"""DiLoCo: microbatches that a new leader leaves out, since its predecessor may have granted them to someone who has not
reported yet. How many is drawn: the predecessor may go on granting for a while, or a second peer take over as well,
where the network is parted. Missing is allowed there, double is not."""


@dataclass(frozen=True, kw_only=True)
class RoundView:
    """What a leader knows of its stage's round."""

    round: int
    committed: Set[int]
    """Microbatches that some member has committed, and one hears of it."""
    counted: Set[int]
    """Those, and the ones that a member had committed who is silent, not there, or left out."""
    lost: Set[int]
    """Of the latter, those that have certainly died with it."""
    highest_microbatch: int
    """Highest id that any member has seen; -1 for none."""
    quiet_seconds: float
    """Seconds since a member last committed anything."""
    awaits_reports: bool
    """A peer of the stage, alive as far as one knows, has not told yet what it has."""
    misses_member: bool
    """A member fell silent in the last 20 s, and may come back with more than it has told of."""
    complete: bool
    """The stage has all that the round needs."""


@dataclass(frozen=True, kw_only=True)
class Grant:
    """What a trainer was given."""

    microbatches: Sequence[int]
    accumulate_only_at: int | None = None
    spare: bool = False
    """A member that does not answer may have them, and come back."""
    all_granted: bool = False
    """At stage 0: nothing of the round is left to be granted but replays."""


@dataclass
class _Lease:
    trainer_id: str
    has_arrived: bool
    """Whether the trainer knows of it, as far as one can tell: the answer that grants it may be lost."""


@dataclass(frozen=True)
class _Finished:
    trainer_id: str
    at: float
    """When the trainer stopped holding a microbatch without giving it back."""


class LeaseTable:
    """The leases of one stage, while this peer leads it."""

    def __init__(self, config: RunConfig, stage: int, clock: Clock, rng: random.Random) -> None:
        self._config = config
        self._stage = stage
        self._clock = clock
        self._rng = rng
        self._leads_since = self._asked_at = clock.monotonic()
        self._leases: dict[int, _Lease] = {}
        self._finished: dict[int, _Finished] = {}
        self._heard_at: dict[str, float] = {}
        """When trainers were last heard of; then they renewed all that they hold."""
        self._wanted_at: dict[str, float] = {}
        """When they last wanted something; of late."""
        self._next: int | None = None
        self._skipped = -1
        """The highest id that was known when `_next` was last chosen."""
        self._round = -1

    @property
    def num_leases(self) -> int:
        """Microbatches that some trainer holds."""
        return len(self._leases)

    def acquire(
        self, view: RoundView, trainer_id: str, count: int, *, holding: Collection[int], released: Collection[int],
        acknowledged: Collection[int] = (), all_granted: bool = True, all_committed: bool = True,
    ) -> Grant:  # fmt: skip
        """Renew what a trainer holds, take back what it released, and grant it up to `count` microbatches.

        Args:
            holding: microbatches of the current round that the trainer still works on.
            released: microbatches that it gives back without having run them.
            acknowledged: what it has acknowledged to stage 0, or is about to.
            all_granted: at a later stage, whether stage 0 has granted the whole round: else there is better to do than
                what a member may come back with.
            all_committed: likewise, whether it has committed it: else what lacks here may simply not have come yet.
        """
        self._note_lead()
        self._note_committed(view)
        self._heard_at[trainer_id] = self._clock.monotonic()
        self._renew(trainer_id, holding, released, acknowledged)
        self._end_leases(LEASE_SECONDS)
        if self._config.rounds.synchronous:
            self._note_round(view.round, trainer_id, acknowledged)
            self._note_wanting(trainer_id, count)
            count = 0 if self._gathers(view) else count
            grant = self._grant_of_round(view, trainer_id, count, all_granted, all_committed)
            if count and not grant.microbatches and self._end_leases(DOUBT_SECONDS):
                grant = self._grant_of_round(view, trainer_id, count, all_granted, all_committed)
            return grant
        return self._grant_endless(view, trainer_id, count, released)

    def _note_lead(self) -> None:
        """Trainers ask all the time: if nobody has for a while, this peer was away, and others may have led."""
        now = self._clock.monotonic()
        if now - self._asked_at >= GATHER_SECONDS:
            self._leads_since = now
        self._asked_at = now

    def _gathers(self, view: RoundView) -> bool:
        """Whether this peer leads too short a time to know who holds what, and what is done."""
        seconds = self._clock.monotonic() - self._leads_since
        return seconds < GATHER_SECONDS or (view.awaits_reports and seconds < LONGEST_GATHER_SECONDS)

    def _note_committed(self, view: RoundView) -> None:
        # At once: by the time a dead trainer's lease expires, the members may have forgotten what they committed.
        for microbatch in self._leases.keys() & view.committed:
            lease = self._leases.pop(microbatch)
            self._finished[microbatch] = _Finished(lease.trainer_id, self._clock.monotonic())

    def _renew(
        self, trainer_id: str, holding: Collection[int], released: Collection[int], acknowledged: Collection[int]
    ) -> None:
        now = self._clock.monotonic()
        for microbatch, lease in [(m, lease) for m, lease in self._leases.items() if lease.trainer_id == trainer_id]:
            if microbatch in released:
                del self._leases[microbatch]
            elif microbatch not in holding:
                del self._leases[microbatch]
                # One that never arrived is still to be run, at all stages.
                if lease.has_arrived or microbatch in acknowledged:
                    self._finished[microbatch] = _Finished(trainer_id, now)
        for microbatch in holding:
            # After a change of leader this is how the new one learns who holds what.
            lease = self._leases.setdefault(microbatch, _Lease(trainer_id, has_arrived=True))
            if lease.trainer_id == trainer_id:
                lease.has_arrived = True

    def _end_leases(self, seconds: float) -> bool:
        """End those of trainers that were not heard of for so long; whether there were any."""
        latest = self._clock.monotonic() - seconds
        ended = [m for m, lease in self._leases.items() if self._heard_at[lease.trainer_id] <= latest]
        for microbatch in ended:
            del self._leases[microbatch]
        holders = {lease.trainer_id for lease in self._leases.values()}
        self._heard_at = {t: at for t, at in self._heard_at.items() if at > latest or t in holders}
        return bool(ended)

    def _note_round(self, round_number: int, trainer_id: str, acknowledged: Collection[int]) -> None:
        size = self._config.microbatches_per_round
        if round_number != self._round:
            self._round = round_number
            self._leases = {m: lease for m, lease in self._leases.items() if m // size == round_number}
            self._finished.clear()
        now = self._clock.monotonic()
        # What a new leader hears of before it grants anything was done before it led, or just after.
        at = self._leads_since if now - self._leads_since < GATHER_SECONDS else now
        for microbatch in acknowledged:
            if microbatch // size == round_number:
                self._finished.setdefault(microbatch, _Finished(trainer_id, at))

    def _note_wanting(self, trainer_id: str, count: int) -> None:
        now = self._clock.monotonic()
        self._wanted_at = {trainer: at for trainer, at in self._wanted_at.items() if now - at <= KNOWN_SECONDS}
        if count:
            self._wanted_at[trainer_id] = now

    def _grant_of_round(
        self, view: RoundView, trainer_id: str, count: int, all_granted: bool, all_committed: bool
    ) -> Grant:  # fmt: skip
        size = self._config.microbatches_per_round
        wanted = [
            microbatch
            for microbatch in range(view.round * size, (view.round + 1) * size)
            if microbatch not in view.committed and microbatch not in self._leases
        ]
        away = view.counted - view.committed - view.lost
        may_come_back = bool(away) or view.misses_member
        lost = self._lost(view, wanted, may_be_elsewhere=may_come_back or view.awaits_reports)
        # Replayed at once, they do not hold up the end of the round.
        if (grant := self._lease_replays(trainer_id, lost, count)).microbatches:
            return grant
        if self._stage == 0:
            known = self._finished.keys() | view.counted
            fresh = [microbatch for microbatch in wanted if microbatch not in known]
            if fresh:
                # All at once to the first that asks would be lost with it; the others would have nothing to do.
                share = math.ceil(len(fresh) / max(1, 2 * len(self._wanted_at) - 1))
                return self._lease(trainer_id, fresh[: min(count, share)])
        if not all_granted:
            return Grant(microbatches=())
        # A member that does not answer is not waited for: whoever asks now has nothing better to do, and if it comes
        # back, the replays cost nothing.
        missing = [m for m in wanted if m in away and self._seconds_since(m) >= SHOWN_SECONDS]
        # A peer may serve that the leader reaches and that never reaches the leader.
        all_told = not view.awaits_reports or view.quiet_seconds >= LONGEST_QUIET_SECONDS
        if not missing and all_committed and all_told and view.quiet_seconds >= SETTLE_SECONDS:
            # Their trainers are done with them, yet no member counts them: the one that did must have dropped.
            missing = [m for m in wanted if self._seconds_since(m) >= SETTLE_SECONDS]
        return self._lease_replays(trainer_id, missing, count, spare=may_come_back, all_granted=True)

    def _lost(self, view: RoundView, wanted: Sequence[int], *, may_be_elsewhere: bool) -> list[int]:
        """What need not be waited for: whoever counted it has died, or nobody does so long after it was acknowledged.

        Args:
            may_be_elsewhere: a member that does not answer may have some of the latter.
        """
        found = []
        for microbatch in wanted:
            seconds = self._seconds_since(microbatch)
            died = microbatch in view.lost and seconds >= SHOWN_SECONDS
            if died or (not may_be_elsewhere and LOST_SECONDS <= seconds < math.inf):
                found.append(microbatch)
        return found

    def _seconds_since(self, microbatch: int) -> float:
        """Since its trainer was done with it; endless if that is not known."""
        finished = self._finished.get(microbatch)
        return math.inf if finished is None else self._clock.monotonic() - finished.at

    def _lease_replays(
        self, trainer_id: str, microbatches: Sequence[int], count: int, *, spare: bool = False,
        all_granted: bool = False,
    ) -> Grant:  # fmt: skip
        own = [microbatch for microbatch in microbatches if self._may_replay(trainer_id, microbatch)]
        return self._lease(
            trainer_id, own[:count], accumulate_only_at=self._stage, spare=spare, all_granted=all_granted
        )  # fmt: skip

    def _may_replay(self, trainer_id: str, microbatch: int) -> bool:
        """Whether no other trainer ran it that would run it again now."""
        finished = self._finished.get(microbatch)
        return finished is None or finished.trainer_id == trainer_id or finished.trainer_id not in self._wanted_at

    def _grant_endless(self, view: RoundView, trainer_id: str, count: int, released: Collection[int]) -> Grant:
        """Each is granted once: what is given back, or expires here, another leader may have granted again."""
        known = max([view.highest_microbatch, *self._leases, *released], default=-1)
        if known < 0 and view.awaits_reports and self._clock.monotonic() - self._leads_since < LONGEST_GATHER_SECONDS:
            # Whoever led before may be about to tell what it has granted.
            return Grant(microbatches=())
        # Another peer has granted what is not below, which led while this one was away; or a trainer made it up.
        if self._next is None or (known >= self._next and known != self._skipped):
            self._skipped = known
            self._next = known + 1 + self._rng.randrange(LEAST_SKIP, MOST_SKIP) if known >= 0 else 0
            # In no run's lifetime: a trainer made one up, and ids beyond LARGEST are refused everywhere.
            is_made_up = self._next > LARGEST // 2
            # This peer has downloaded the state, which does not say what was trained on; 0 is what it begins with where
            # others have begun.
            is_unknown = known <= 0 < view.round
            if is_made_up or is_unknown:
                self._next = self._rng.randrange(LARGEST // 2)
        self._finished.clear()
        fresh = range(self._next, self._next + count)
        self._next = fresh.stop
        return self._lease(trainer_id, list(fresh))

    def _lease(
        self, trainer_id: str, microbatches: list[int], accumulate_only_at: int | None = None, *, spare: bool = False,
        all_granted: bool = False,
    ) -> Grant:  # fmt: skip
        if not microbatches:
            return Grant(microbatches=(), all_granted=all_granted)
        for microbatch in microbatches:
            # A replay is done sooner than it is heard of.
            is_replay = accumulate_only_at is not None
            self._leases[microbatch] = _Lease(trainer_id, has_arrived=is_replay)
        return Grant(
            microbatches=microbatches, accumulate_only_at=accumulate_only_at, spare=spare, all_granted=all_granted
        )  # fmt: skip
