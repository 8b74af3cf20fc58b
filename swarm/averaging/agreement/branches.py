"""Which branches of a run the holders of a stage are on, and which of these this peer should follow.

Any holder can claim to be far ahead, so a branch is chosen by the number of holders that stand behind it, and not by
what one of them claims. No state is checked here: that happens when it is installed (advance).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import PAST, Standing
from swarm.averaging.agreement.pace import RunPace
from swarm.averaging.agreement.timing import Timing
from swarm.config import RunConfig
from swarm.machine.clock import Clock
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.run_rounds import RunRounds
from swarm.types import PeerId

KEPT = 1024
"""How many of its own lineages a peer remembers. A holder at one of them is behind, and on the same branch."""
MOST_DOUBTS = 256
"""The most holders on other branches that are remembered."""
SHOWN_SECONDS = 60.0
"""A holder on another branch that this peer does not follow is shown for so long after its last answer."""


@dataclass(frozen=True, kw_only=True)
class Voice:
    """A holder's answer: its standing, and the lineages of the rounds before, oldest first."""

    standing: Standing
    past: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Doubt:
    since: float
    heard_at: float
    standing: Standing
    line: str


class Branches:
    def __init__(
        self, own: Standing, config: RunConfig, clock: Clock, timing: Timing, other_blocks: Callable[[], RunRounds]
    ) -> None:
        """`other_blocks` gives the rounds at which the other blocks are, by what their peers announce."""
        self._is_synchronous = config.rounds.synchronous
        self._other_blocks = other_blocks
        self._clock = clock
        self._more_samples_win = not config.averaging.needs_majority
        """Whether, of two branches with equally many holders, the one with more samples wins. If False, a branch only
        wins if it is rounds ahead."""
        self._patience_seconds = timing.fresh_seconds
        """After this peer finds a holder on another branch and does not follow it, this peer begins no round for so
        many seconds. That holder may be the first that has committed the present round."""
        self._own = own
        self._past: dict[str, Standing | None] = {own.lineage: own}
        """Where this peer stood, by lineage, oldest first and including the present place. None where only the lineage
        is known."""
        self._has_voice = own.round > 0
        """Whether this peer committed its present state itself or resumed from it; False if it came from others."""
        self._pace = RunPace(own, clock)
        self._voices: dict[PeerId, Voice] = {}
        self._announced: Mapping[PeerId, Standing] = {}
        """The places that peers announced before they fell silent, except those where this peer stood itself."""
        self._doubts: dict[PeerId, _Doubt] = {}

    # -- this peer's moves ---------------------------------------------------------------------------------------------

    def committed(self, after: Standing) -> None:
        self._pace.committed(after)
        self._has_voice = True
        self._move(after)

    def applied_missed(self, after: Standing) -> None:
        self._pace.moved(after)
        self._has_voice = False
        self._move(after)

    def installed(self, own: Standing, past: Sequence[str]) -> None:
        """Note that this peer has installed a state of others, with the lineages of the rounds before it."""
        self._past = dict.fromkeys(past[-PAST:])
        self.applied_missed(own)

    def _move(self, own: Standing) -> None:
        self._own = own
        self._past.pop(own.lineage, None)
        self._past[own.lineage] = own
        for oldest in list(itertools.islice(self._past, max(0, len(self._past) - KEPT))):
            del self._past[oldest]
        self._doubts = {peer: doubt for peer, doubt in self._doubts.items() if not self.is_known(doubt.standing)}

    @property
    def told(self) -> list[str]:
        """The lineages of the last rounds before this one, for others; oldest first."""
        return list(self._past)[-PAST - 1 : -1]

    def is_known(self, standing: Standing) -> bool:
        """Whether this peer stands at `standing`, or stood there before. No peer that stands there is ahead of this
        one."""
        return standing.lineage in self._past and self._past[standing.lineage] in (None, standing)

    # -- where others stand --------------------------------------------------------------------------------------------

    def listen(self) -> None:
        self._voices.clear()

    def heard(self, peer_id: PeerId, voice: Voice) -> None:
        self._voices[peer_id] = voice
        self.reported(peer_id, voice.standing)

    def reported(self, peer_id: PeerId, standing: Standing) -> None:
        """Note where a holder stands by its own report. If this peer knows the place, the holder is on another branch
        no longer."""
        if self.is_known(standing):
            self._doubts.pop(peer_id, None)

    def behind(self, standing: Standing) -> set[PeerId]:
        """The holders that stand at this place or have passed it, according to their own answers."""
        return {peer for peer, voice in self._voices.items() if _has_passed(voice, standing)}

    def is_at_pace(self, round_number: int) -> bool:
        return self._pace.allows_round(round_number)

    def choose(self, *, is_sound: bool, announced: Mapping[PeerId, Standing]) -> Standing | None:
        """Decide where this peer should go; None if it is to stay where it is.

        Candidates are the places where others stand and this peer never did. A candidate is kept if more holders stand
        behind it than behind this peer's own place, or if equally many do and it has more samples. A place that only
        one holder names must also be near enough for the run's pace since this peer last moved. Of the candidates that
        are left, the one with the most holders behind it is chosen, and among equals the farthest.

        Args:
            is_sound: whether this peer's own state is correct. If not, its place is a candidate like those of others.
            announced: where peers said that they were, in records that they signed. These peers may have died since.
                They count for a place if a living holder stands behind it too, and they never count for staying.
        """
        self._announced = {
            peer: standing
            for peer, standing in announced.items()
            if peer not in self._voices and not self.is_known(standing)
        }
        elsewhere = {
            place
            for place in {voice.standing for voice in self._voices.values()} | set(self._announced.values())
            if place.round > 0
            and (not self.is_known(place) or (not is_sound and place == self._own))
            and self.behind(place)
        }
        due = [place for place in elsewhere if not is_sound or self._yields_to(place)]
        return max(due, key=lambda place: (self._num_behind(place), self._order(place)), default=None)

    def _num_behind(self, place: Standing) -> int:
        return len(self.behind(place)) + sum(standing == place for standing in self._announced.values())

    def _yields_to(self, theirs: Standing) -> bool:
        if not self._more_samples_win and theirs.round <= self._own.round:
            return False
        num_theirs, num_ours = self._num_behind(theirs), len(self._ours(theirs))
        if not self._is_credible(theirs, num_theirs):
            return False
        if num_theirs != num_ours:
            return num_theirs > num_ours
        # A peer that got its state from others keeps it, unless more peers hold the other state.
        if not self._has_voice or self._order(theirs) <= self._order(self._own):
            return False
        places = (voice.standing for voice in self._voices.values())
        return not any(place.round > 0 and self.is_known(place) and place != self._own for place in places)

    def _is_credible(self, theirs: Standing, num_holders: int) -> bool:
        return num_holders > 1 or self._pace.allows(theirs)

    def _order(self, standing: Standing) -> tuple[int, int, str]:
        numbers = (standing.run_samples, standing.round) if self._more_samples_win else (standing.round, 0)
        return *numbers, standing.lineage

    def _ours(self, theirs: Standing) -> list[str]:
        """The peers that stand behind this peer's place and not behind `theirs`, this peer included.

        A peer that stands where both branches begin has not decided yet. No peer counts if the other stages are two
        rounds ahead: they waited for this stage, so some of its holders must have committed these rounds.
        """
        if self._is_synchronous and self._other_blocks().middle > self._own.round + 1:
            return []
        before = set[str]().union(*(self._voices[peer].past for peer in self.behind(theirs)))
        ours = ["this peer"] if self._has_voice else []
        for peer, voice in self._voices.items():
            place = voice.standing
            undecided = place.lineage in before and place != self._own
            # At round 0 a peer holds only what the configuration gives everybody, so its place does not count.
            if place.round > 0 and self.is_known(place) and not undecided and not _has_passed(voice, theirs):
                ours.append(peer)
        return ours

    # -- holders that are not followed ---------------------------------------------------------------------------------

    def stay(self) -> list[str]:
        """Note that this peer stays where it is. Returns a line for the log for each holder that has now been on
        another branch for long."""
        now, refused = self._clock.monotonic(), []
        for peer, voice in self._voices.items():
            if self.is_known(voice.standing):
                continue
            before, line = self._doubts.get(peer), self._describe(peer, voice.standing)
            doubt = _Doubt(since=before.since if before else now, heard_at=now, standing=voice.standing, line=line)
            if self._is_refused(doubt) and not (before and self._is_refused(before)):
                refused.append(line)
            self._doubts[peer] = doubt
        for peer in sorted(self._doubts, key=lambda peer: self._doubts[peer].heard_at)[:-MOST_DOUBTS]:
            del self._doubts[peer]
        return refused

    def is_elsewhere(self, peer_id: PeerId) -> bool:
        """Whether this peer knows that the holder is on another branch, and decided not to follow it."""
        return peer_id in self._doubts

    @property
    def is_in_doubt(self) -> bool:
        """Whether a holder was found on another branch only lately. It may be the first that has committed the present
        round."""
        latest = self._clock.monotonic() - self._patience_seconds
        return any(doubt.since > latest for doubt in self._doubts.values())

    def _is_refused(self, doubt: _Doubt) -> bool:
        return doubt.heard_at - doubt.since >= self._patience_seconds

    @property
    def refusals(self) -> list[str]:
        """A line for each holder on another branch that this peer does not follow, by its last answer."""
        oldest = self._clock.monotonic() - SHOWN_SECONDS
        doubts = [self._doubts[peer] for peer in sorted(self._doubts)]
        return [doubt.line for doubt in doubts if self._is_refused(doubt) and doubt.heard_at >= oldest]

    def _describe(self, peer_id: PeerId, theirs: Standing) -> str:
        num_theirs, num_ours = self._num_behind(theirs), len(self._ours(theirs))
        why = f"{num_theirs} of {num_theirs + num_ours} stand behind it"
        if not self._is_credible(theirs, num_theirs):
            why += ", and the run cannot have come so far at the pace that was seen here"
        return (
            f"{peer_id} says that it is at round {theirs.round} of another branch, with {theirs.run_samples} samples "
            f"(lineage {theirs.lineage[:12]}): {why}; this peer stays at round {self._own.round}"
        )


def _has_passed(voice: Voice, standing: Standing) -> bool:
    num_since = voice.standing.round - standing.round
    return voice.standing == standing or (
        0 < num_since <= len(voice.past) and voice.past[-num_since] == standing.lineage
    )


def voice_of(message: pb.ReportReply | pb.SnapshotHeader) -> Voice:
    """Read from a message where its sender stands. Raises MalformedMessage."""
    return Voice(standing=messages.unpack_standing(message.standing), past=messages.unpack_past(message.past))


def most_held(offers: Mapping[bytes, Voice], num_holders: Mapping[bytes, int]) -> list[bytes]:
    """Rank offers and return their names, best first. First come the offers that more than half of the holders stand
    behind, the farthest of them first. Then come the others, by the number of holders behind them. `num_holders` says
    how many holders make each offer."""
    num_all = sum(num_holders.values())

    def rank(name: bytes) -> tuple[bool, int, Standing, int]:
        standing = offers[name].standing
        num_behind = sum(num_holders[other] for other, voice in offers.items() if _has_passed(voice, standing))
        is_held = 2 * num_behind > num_all
        return is_held, 0 if is_held else num_behind, standing, num_holders[name]

    return sorted(offers, key=rank, reverse=True)
