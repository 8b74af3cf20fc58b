"""Leases: which trainer runs which microbatches. Pure; lease_service sends the answers.

Stage 0's leader grants new microbatches; where stage 0 has variants, the leader of each grants those whose path begins
there. In the synchronous setting each block's leader also grants the microbatches that its block has lost. A lease
expires unless its trainer renews it. If a trainer renews but gets nothing done, its microbatches go to another trainer
that has nothing else to do. A trainer's claim to hold a microbatch counts only if the trainer was granted it.
"""

import itertools
import math
import random
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass

from swarm.config import RunConfig
from swarm.machine.clock import Clock
from swarm.pipeline.round_leases import Finished, RoundLeases, Wish
from swarm.pipeline.trainers import DOUBT_SECONDS, Trainer, Trainers
from swarm.types import LARGEST_COUNT, LEASE_SECONDS, Block

GATHER_SECONDS = 1.0
"""A peer that takes the lead grants nothing of a synchronous round for this long. Trainers renew their leases twice as
often, so after this time the peer knows what they hold. They have enough to do meanwhile."""
LONGEST_GATHER_SECONDS = 5.0
"""The same as GATHER_SECONDS, while a peer of the stage has not reported yet which microbatches it has."""
SETTLE_SECONDS = 0.75
"""How long a stage must have seen no change before a microbatch that it lacks counts as missing."""
LONGEST_QUIET_SECONDS = 20.0
"""The same as SETTLE_SECONDS, while a peer of the stage has not reported which microbatches it has."""
SHOWN_SECONDS = 1.5
"""The longest time, while a round goes on, from the trainer's ack of a microbatch until the microbatch shows as
committed."""
LOST_SECONDS = LEASE_SECONDS
"""A microbatch that does not show as committed for this long after its ack is lost, even while the round goes on. Lines
stall for some seconds, and a member waits as long for a retry."""
LEAST_SKIP, MOST_SKIP = 1 << 12, 1 << 30
"""DiLoCo: bounds of the number of ids that a new leader skips, because its predecessor may have granted them to a
trainer that has not reported yet. The number is drawn at random. If the network is split, the predecessor may go on
granting, or a second peer may take over too. An id may be left out, but must not be used twice."""


@dataclass(frozen=True, kw_only=True)
class RoundView:
    round: int
    microbatches: Collection[int]
    """Those that a synchronous round consists of at the block; none with DiLoCo."""
    committed: Set[int]
    """Microbatches that members which report to this leader have committed."""
    counted: Set[int]
    """The committed microbatches, and those of members that are silent, away, or left out."""
    lost: Set[int]
    """Counted microbatches whose member has certainly died."""
    highest_microbatch: int
    """Highest id that any member has seen; -1 for none."""
    quiet_seconds: float
    """Since a member last committed anything."""
    awaits_reports: bool
    """Whether a peer of the stage that seems to be alive has not reported yet which microbatches it has."""
    misses_member: bool
    """Whether a member fell silent in the last 20 s. It may come back with more microbatches than it has reported."""
    complete: bool


@dataclass(frozen=True, kw_only=True)
class Grant:
    microbatches: Sequence[int]
    accumulate_only_at: int | None = None
    all_granted: bool = False
    """Whether stage 0 has granted all microbatches of the round, so that only replays may be left to grant."""


class LeaseTable:
    """The leases of one block, while this peer leads it.

    With DiLoCo every microbatch is granted once and no peer waits for it, so no leases are kept.
    """

    def __init__(self, config: RunConfig, block: Block, clock: Clock, rng: random.Random) -> None:
        self._config = config
        self._block = block
        self._clock = clock
        self._rng = rng
        self._leads_since = self._asked_at = clock.monotonic()
        self._trainers = Trainers(clock)
        self._round = RoundLeases(config, -1, self._trainers, clock)
        self._fresh: dict[int, Iterator[int]] = {}
        """DiLoCo: the ids that are granted next, by path."""
        self._next: int | None = None
        """No id from this one on has been granted."""
        self._skipped = -1
        """The highest id that was known when `_next` was last chosen."""

    def acquire(
        self, view: RoundView, trainer: Trainer, paths: Sequence[int], *, holding: Collection[int],
        released: Collection[int], acknowledged: Collection[int] = (), all_granted: bool = True,
        all_committed: bool = True,
    ) -> Grant:  # fmt: skip
        """Renew a trainer's leases, take back what it released, and grant it microbatches of these `paths`, each of
        which is named as often as one of it is wanted.

        What it is `holding` is by its own account; it has `acknowledged` to stage 0, or is about to. A later stage is
        told whether stage 0 has granted all of the round (if not, trainers have better to do than to replay what a
        member may come back with), and committed all of it (if not, what is missing here may still be on its way).
        """
        self._note_lead()
        if not self._config.rounds.synchronous:
            return self._grant_endless(view, paths, [*holding, *released])
        state = self._at_round(view)
        state.note_committed(view.committed)
        self._trainers.hear(trainer)
        state.renew(trainer, holding, released, acknowledged)
        gathers = self._gathers(view)
        self._note_told(view, trainer, holding, acknowledged, gathers=gathers)
        state.end_silent(LEASE_SECONDS)
        wish = Wish(trainer, paths, 0 if gathers else min(len(paths), state.room(trainer)))
        self._trainers.note_wish(trainer, paths if wish.most else ())
        grant = self._grant_of_round(view, wish, all_granted, all_committed)
        if wish.most and not grant.microbatches and (state.end_silent(DOUBT_SECONDS) or state.end_overdue(trainer)):
            grant = self._grant_of_round(view, wish, all_granted, all_committed)
        return grant

    def _at_round(self, view: RoundView) -> RoundLeases:
        if view.round != self._round.number:
            self._round.note_ended()
            self._round = RoundLeases(self._config, view.round, self._trainers, self._clock)
        self._round.ids = view.microbatches
        return self._round

    def _note_lead(self) -> None:
        """If no trainer asked for a while, count this peer as a new leader: it was away, and others may have led."""
        now = self._clock.monotonic()
        if now - self._asked_at >= GATHER_SECONDS:
            self._leads_since = now
        self._asked_at = now

    def _gathers(self, view: RoundView) -> bool:
        """Whether this peer has led for too short a time to know which microbatches are held, and which are done."""
        seconds = self._clock.monotonic() - self._leads_since
        return seconds < GATHER_SECONDS or (view.awaits_reports and seconds < LONGEST_GATHER_SECONDS)

    def _note_told(
        self, view: RoundView, trainer: Trainer, holding: Collection[int], acknowledged: Collection[int], *,
        gathers: bool,
    ) -> None:  # fmt: skip
        """Note a trainer's claims about leases that this leader has not granted, as far as they are believed."""
        state, now = self._round, self._clock.monotonic()
        # Acks that a new leader learns of before it grants anything were sent before it led, or soon after.
        at = self._leads_since if now - self._leads_since < GATHER_SECONDS else now
        for microbatch in acknowledged:
            # Stage 0 has granted the microbatch itself, and so can check this. A later stage cannot.
            if microbatch in state.ids and (self._block.stage > 0 or state.was_given(trainer, microbatch)):
                state.finished.setdefault(microbatch, Finished(trainer, at))
        if gathers:
            state.note_claim(trainer, holding, acknowledged if self._block.stage == 0 else ())
        else:
            state.believe_claims(view.committed, is_replay=self._block.stage > 0, at=self._leads_since)

    def _grant_of_round(self, view: RoundView, wish: Wish, all_granted: bool, all_committed: bool) -> Grant:
        wanted = [m for m in self._round.ids if m not in view.committed and m not in self._round.leases]
        away = view.counted - view.committed - view.lost
        may_come_back = bool(away) or view.misses_member
        lost = self._lost(view, wanted, may_be_elsewhere=may_come_back or view.awaits_reports)
        # Lost microbatches are replayed at once, so that they do not hold up the end of the round.
        if (grant := self._lease_replays(wish, lost)).microbatches:
            return grant
        if self._block.stage == 0:
            known = self._round.finished.keys() | view.counted
            fresh = [microbatch for microbatch in wanted if microbatch not in known]
            if fresh:
                # A trainer gets only a share. If it got all, the others would have nothing to do, and all would be lost
                # if it died.
                paths = frozenset(wish.paths)
                own = [microbatch for microbatch in fresh if self._config.path_of(microbatch) in paths]
                share = math.ceil(len(own) / (2 * self._trainers.num_parts(wish.trainer) - 1))
                allowed = self._round.allowed(wish, own)[:share]
                for microbatch in allowed:
                    self._round.give(wish.trainer, microbatch, is_replay=False, has_arrived=False)
                return Grant(microbatches=allowed)
        if not all_granted:
            return Grant(microbatches=())
        # Microbatches of a member that does not answer are replayed, as a trainer that asks now has nothing better to
        # do. If the member comes back, two members count the same microbatch, and one of them gives it up.
        missing = [m for m in wanted if m in away and self._seconds_since(m) >= SHOWN_SECONDS]
        # Reports are not awaited for ever, because a peer may be unable to reach the leader.
        all_told = not view.awaits_reports or view.quiet_seconds >= LONGEST_QUIET_SECONDS
        if not missing and all_committed and all_told and view.quiet_seconds >= SETTLE_SECONDS:
            # Trainers have acknowledged these, but no member counts them. The member that had them must have died.
            missing = [m for m in wanted if self._seconds_since(m) >= SETTLE_SECONDS]
        return self._lease_replays(wish, missing, all_granted=True)

    def _lost(self, view: RoundView, wanted: Sequence[int], *, may_be_elsewhere: bool) -> list[int]:
        """The wanted microbatches whose member has died, or that no member counts LOST_SECONDS after their ack. If they
        may be elsewhere, at a member that does not answer, the latter are left out."""
        found = []
        for microbatch in wanted:
            seconds = self._seconds_since(microbatch)
            died = microbatch in view.lost and seconds >= SHOWN_SECONDS
            if died or (not may_be_elsewhere and LOST_SECONDS <= seconds < math.inf):
                found.append(microbatch)
        return found

    def _seconds_since(self, microbatch: int) -> float:
        """The seconds since a trainer was done with the microbatch; infinity if none is known to be."""
        finished = self._round.finished.get(microbatch)
        return math.inf if finished is None else self._clock.monotonic() - finished.at

    def _lease_replays(self, wish: Wish, microbatches: Sequence[int], *, all_granted: bool = False) -> Grant:
        allowed = self._round.allowed(wish, microbatches)
        # A replay may end before its trainer renews the lease, so its grant counts as arrived from the start.
        for microbatch in allowed:
            self._round.give(wish.trainer, microbatch, is_replay=True, has_arrived=True)
        only_at = self._block.stage if allowed else None
        return Grant(microbatches=allowed, accumulate_only_at=only_at, all_granted=all_granted)

    def _grant_endless(self, view: RoundView, paths: Sequence[int], told: Collection[int]) -> Grant:
        """Grant new ids of these paths, above those that the trainer claims to hold from any leader. No id is granted
        twice, even if a trainer gives it back, because another leader may have granted it too.

        Each path has a sequence of its own, so that no text is left out of one because another is wanted more often.
        """
        known = max(view.highest_microbatch, max(told, default=-1))
        if known < 0 and view.awaits_reports and self._clock.monotonic() - self._leads_since < LONGEST_GATHER_SECONDS:
            # The peer that led before may be about to report the highest id that it has seen.
            return Grant(microbatches=())
        # If ids from `_next` on are known, another peer granted them while it led, or a trainer has made them up.
        if self._next is None or (known >= self._next and known != self._skipped):
            self._skipped = known
            self._next = known + 1 + self._rng.randrange(LEAST_SKIP, MOST_SKIP) if known >= 0 else 0
            # No run gets this far, so a trainer has invented an id. Ids beyond LARGEST_COUNT are refused everywhere.
            is_made_up = self._next > LARGEST_COUNT // 2
            # No id is known though the run has gone on: this peer has downloaded its state, which contains no ids. It
            # must not begin with 0 again.
            is_unknown = known <= 0 < view.round
            if is_made_up or is_unknown:
                self._next = self._rng.randrange(LARGEST_COUNT // 2)
            num_paths = len(self._config.paths)
            self._fresh = {
                path: itertools.count(self._next + (path - self._next) % num_paths, num_paths)
                for path in self._config.paths_through(self._block)
            }
        fresh = sorted(next(self._fresh[path]) for path in paths)
        self._next = max([self._next, *(microbatch + 1 for microbatch in fresh)])
        return Grant(microbatches=fresh)
