"""Leases: which trainer runs which microbatches.

The leader of a stage's group grants them: stage 0's leader hands out new microbatches, any stage's leader the
ones that its stage has lost (synchronous setting). A lease expires unless its trainer renews it, so a dead
trainer's microbatches go to another; and so do, where another has nothing else to do, those of a trainer that renews
and gets nothing done. What a trainer says that it holds counts only if it was granted that. `LeaseTable` decides and is
pure; lease_service carries its answers.
"""

import math
import random
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass

from swarm.config import RunConfig
from swarm.machine.clock import Clock
from swarm.pipeline.round_leases import Finished, RoundLeases
from swarm.pipeline.trainers import DOUBT_SECONDS, Trainer, Trainers
from swarm.types import LARGEST_COUNT

LEASE_SECONDS = 8.0
"""Lifetime of a lease that is not renewed. An Ack of its trainer may be under way for longer. Synchronous: should it
count all the same, after another trainer ran the microbatch as well, one of the two is taken out, as where two trainers
hold one lease; with DiLoCo no other trainer ever runs it."""
GATHER_SECONDS = 1.0
"""How long a peer that takes the lead grants nothing of a synchronous round. Trainers renew their leases twice as
often, so it knows then what they hold, and they have enough to do meanwhile."""
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
LEAST_SKIP, MOST_SKIP = 1 << 12, 1 << 30
"""DiLoCo: microbatches that a new leader leaves out, since its predecessor may have granted them to a trainer that has
not reported yet. How many is drawn: the predecessor may go on granting for a while, or a second peer take over as well,
where the network is parted. Missing is allowed there, double is not."""


@dataclass(frozen=True, kw_only=True)
class RoundView:
    """What a leader knows of its stage's round."""

    round: int
    committed: Set[int]
    """Microbatches that some member has committed, and one hears of it."""
    counted: Set[int]
    """The microbatches that are committed, and those that a member has which is silent, not there, or left out."""
    lost: Set[int]
    """Those of them that have certainly died with it."""
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
    all_granted: bool = False
    """Whether nothing is left of the round to be granted but replays, at stage 0."""


class LeaseTable:
    """The leases of one stage, while this peer leads it.

    With DiLoCo every microbatch is granted once, to any trainer, and no peer waits for it: there is nothing to keep of
    it.
    """

    def __init__(self, config: RunConfig, stage: int, clock: Clock, rng: random.Random) -> None:
        self._config = config
        self._stage = stage
        self._clock = clock
        self._rng = rng
        self._leads_since = self._asked_at = clock.monotonic()
        self._trainers = Trainers(clock)
        self._round = RoundLeases(-1, config.microbatches_per_round, self._trainers, clock)
        self._next: int | None = None
        self._skipped = -1
        """The highest id that was known when `_next` was last chosen."""

    @property
    def num_leases(self) -> int:
        """Microbatches that some trainer holds."""
        return len(self._round.leases)

    def acquire(
        self, view: RoundView, trainer: Trainer, count: int, *, holding: Collection[int], released: Collection[int],
        acknowledged: Collection[int] = (), all_granted: bool = True, all_committed: bool = True,
    ) -> Grant:  # fmt: skip
        """Renew what a trainer holds, take back what it released, and grant it up to `count` microbatches.

        Args:
            holding: microbatches of the current round that the trainer still works on, as it says.
            released: microbatches that it gives back without having run them.
            acknowledged: what it has acknowledged to stage 0, or is about to.
            all_granted: at a later stage, whether stage 0 has granted the whole round: else there is better to do than
                what a member may come back with.
            all_committed: likewise, whether it has committed it: else what lacks here may simply not have come yet.
        """
        self._note_lead()
        if not self._config.rounds.synchronous:
            return self._grant_endless(view, count, [*holding, *released])
        state = self._at_round(view.round)
        state.note_committed(view.committed)
        self._trainers.hear(trainer)
        state.renew(trainer, holding, released, acknowledged)
        gathers = self._gathers(view)
        self._note_told(view, trainer, holding, acknowledged, gathers=gathers)
        state.end_silent(LEASE_SECONDS)
        count = 0 if gathers else min(count, state.room(trainer))
        self._trainers.note_wish(trainer, wants=count > 0)
        grant = self._grant_of_round(view, trainer, count, all_granted, all_committed)
        if count and not grant.microbatches and (state.end_silent(DOUBT_SECONDS) or state.end_overdue(trainer)):
            grant = self._grant_of_round(view, trainer, count, all_granted, all_committed)
        return grant

    def _at_round(self, number: int) -> RoundLeases:
        if number != self._round.number:
            self._round.note_ended()
            self._round = RoundLeases(number, self._config.microbatches_per_round, self._trainers, self._clock)
        return self._round

    def _note_lead(self) -> None:
        """Trainers ask all the time. If none has for a while, this peer was away, and others may have led."""
        now = self._clock.monotonic()
        if now - self._asked_at >= GATHER_SECONDS:
            self._leads_since = now
        self._asked_at = now

    def _gathers(self, view: RoundView) -> bool:
        """Whether this peer has led for too short a time to know which trainer holds what, and what is done."""
        seconds = self._clock.monotonic() - self._leads_since
        return seconds < GATHER_SECONDS or (view.awaits_reports and seconds < LONGEST_GATHER_SECONDS)

    def _note_told(
        self, view: RoundView, trainer: Trainer, holding: Collection[int], acknowledged: Collection[int], *,
        gathers: bool,
    ) -> None:  # fmt: skip
        """What a trainer says of leases that this leader has not granted, as far as it is believed."""
        state, now = self._round, self._clock.monotonic()
        # What a new leader hears of before it grants anything was done before it led, or just after.
        at = self._leads_since if now - self._leads_since < GATHER_SECONDS else now
        for microbatch in acknowledged:
            # Stage 0 has granted it itself. To a later stage this is news, which it cannot check.
            if microbatch in state.ids and (self._stage > 0 or state.was_given(trainer, microbatch)):
                state.finished.setdefault(microbatch, Finished(trainer, at))
        if gathers:
            state.note_claim(trainer, holding, acknowledged if self._stage == 0 else ())
        else:
            state.believe_claims(view.committed, is_replay=self._stage > 0, at=self._leads_since)

    def _grant_of_round(
        self, view: RoundView, trainer: Trainer, count: int, all_granted: bool, all_committed: bool
    ) -> Grant:
        wanted = [m for m in self._round.ids if m not in view.committed and m not in self._round.leases]
        away = view.counted - view.committed - view.lost
        may_come_back = bool(away) or view.misses_member
        lost = self._lost(view, wanted, may_be_elsewhere=may_come_back or view.awaits_reports)
        # Replayed at once, they do not hold up the end of the round.
        if (grant := self._lease_replays(trainer, lost, count)).microbatches:
            return grant
        if self._stage == 0:
            known = self._round.finished.keys() | view.counted
            fresh = [microbatch for microbatch in wanted if microbatch not in known]
            if fresh:
                # All at once to the first that asks would be lost with it; the others would have nothing to do.
                share = math.ceil(len(fresh) / (2 * self._trainers.num_parts(trainer) - 1))
                return self._lease(trainer, self._round.allowed(trainer, fresh)[: min(count, share)])
        if not all_granted:
            return Grant(microbatches=())
        # A member that does not answer is not waited for: a trainer that asks now has nothing better to do. If the
        # member comes back, two members count the same microbatch, and one of them gives it up.
        missing = [m for m in wanted if m in away and self._seconds_since(m) >= SHOWN_SECONDS]
        # A peer may serve that the leader reaches and that never reaches the leader.
        all_told = not view.awaits_reports or view.quiet_seconds >= LONGEST_QUIET_SECONDS
        if not missing and all_committed and all_told and view.quiet_seconds >= SETTLE_SECONDS:
            # Their trainers are done with them, yet no member counts them: the one that did must have dropped.
            missing = [m for m in wanted if self._seconds_since(m) >= SETTLE_SECONDS]
        return self._lease_replays(trainer, missing, count, all_granted=True)

    def _lost(self, view: RoundView, wanted: Sequence[int], *, may_be_elsewhere: bool) -> list[int]:
        """What need not be waited for: the member that counted it has died, or none counts it so long after its Ack.

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
        finished = self._round.finished.get(microbatch)
        return math.inf if finished is None else self._clock.monotonic() - finished.at

    def _lease_replays(
        self, trainer: Trainer, microbatches: Sequence[int], count: int, *, all_granted: bool = False
    ) -> Grant:
        allowed = self._round.allowed(trainer, microbatches)
        return self._lease(trainer, allowed[:count], accumulate_only_at=self._stage, all_granted=all_granted)

    def _lease(
        self,
        trainer: Trainer,
        microbatches: list[int],
        *,
        accumulate_only_at: int | None = None,
        all_granted: bool = False,
    ) -> Grant:
        if not microbatches:
            return Grant(microbatches=(), all_granted=all_granted)
        # A replay is done sooner than it is heard of.
        is_replay = accumulate_only_at is not None
        for microbatch in microbatches:
            self._round.give(trainer, microbatch, is_replay=is_replay, has_arrived=is_replay)
        return Grant(microbatches=microbatches, accumulate_only_at=accumulate_only_at, all_granted=all_granted)

    def _grant_endless(self, view: RoundView, count: int, told: Collection[int]) -> Grant:
        """Each is granted once: what is given back, or expires here, another leader may have granted again.

        Args:
            told: what the trainer says that it was granted, by whomever.
        """
        known = max(view.highest_microbatch, max(told, default=-1))
        if known < 0 and view.awaits_reports and self._clock.monotonic() - self._leads_since < LONGEST_GATHER_SECONDS:
            # The peer that led before may be about to tell what it has granted.
            return Grant(microbatches=())
        # Ids from `_next` on were granted by a peer that led while this one was away, or a trainer has made them up.
        if self._next is None or (known >= self._next and known != self._skipped):
            self._skipped = known
            self._next = known + 1 + self._rng.randrange(LEAST_SKIP, MOST_SKIP) if known >= 0 else 0
            # No run gets that far, so a trainer has made an id up; and ids beyond LARGEST_COUNT are refused everywhere.
            is_made_up = self._next > LARGEST_COUNT // 2
            # This peer has downloaded the state, which does not say what was trained on. It would begin with 0 again.
            is_unknown = known <= 0 < view.round
            if is_made_up or is_unknown:
                self._next = self._rng.randrange(LARGEST_COUNT // 2)
        fresh = range(self._next, self._next + count)
        self._next = fresh.stop
        return Grant(microbatches=fresh)
