"""What the other peers of a stage have told of the present round: what each has of it, and what has died with one.

Part of a roster (members/roster). Pure.
"""

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass

from swarm.averaging import messages
from swarm.averaging.leading.group import Ballot
from swarm.averaging.messages import Standing
from swarm.rpc.bounds import LONGEST_LIST
from swarm.training.round_member import Progress
from swarm.types import PeerId


@dataclass(frozen=True, kw_only=True)
class Report:
    """The newest word of a member."""

    progress: Progress
    prepared: Ballot | None
    heard_at: float

    @property
    def standing(self) -> Standing:
        """Where its sender is."""
        return messages.standing_of(self.progress)


class RoundReports:
    """What was told of one round after the other.

    Attributes:
        current: the newest report of each peer that is not suspected.
        last: the newest of all that were heard of in this round, present or not.
    """

    def __init__(self, round_microbatches: int | None) -> None:
        """
        Args:
            round_microbatches: of a synchronous round; None with DiLoCo.
        """
        self._round_microbatches = round_microbatches
        self.current: dict[PeerId, Report] = {}
        self.last: dict[PeerId, Report] = {}
        self._counted: set[int] = set()
        self._lost: set[int] = set()

    def named(self, round_number: int, gaps: Iterable[int]) -> frozenset[int]:
        """The microbatches of a round that a peer names; with DiLoCo none, whatever it names: nobody asks which."""
        size = self._round_microbatches
        if size is None:
            return frozenset()
        return messages.unpack_indices_of(range(round_number * size, (round_number + 1) * size), gaps)

    def hear(self, peer_id: PeerId, report: Report) -> None:
        """A peer has told what it has of the round."""
        before = self.last.get(peer_id)
        if before is not None and before.standing == report.standing:
            # Started again, or it gave up what others had.
            _add(self._lost, before.progress.committed - report.progress.committed)
        self.count(report.progress.committed)
        self.last[peer_id] = report

    def count(self, committed: Set[int]) -> None:
        """Somebody has committed these, though it may be gone with them."""
        _add(self._counted, committed)

    def lose(self, peer_id: PeerId) -> None:
        """A peer is gone, and what it had committed in this round with it."""
        if (last := self.last.pop(peer_id, None)) is not None:
            _add(self._lost, last.progress.committed)

    def begin_round(self) -> None:
        """What was told of the round before is out of date, but not which peers are there."""
        self.last.clear()
        self._counted.clear()
        self._lost.clear()

    def forget_others(self, known: Collection[PeerId]) -> None:
        """Let go of what was told by peers that are not among these."""
        self.current = {peer: report for peer, report in self.current.items() if peer in known}
        self.last = {peer: report for peer, report in self.last.items() if peer in known}

    @property
    def counted(self) -> frozenset[int]:
        """What any of them has committed in this round, though it may be gone with it."""
        return frozenset(self._counted)

    @property
    def lost(self) -> frozenset[int]:
        """What has died with a peer, and none of the others has told that it has it."""
        return frozenset(self._lost.difference(*(last.progress.committed for last in self.last.values())))


def _add(known: set[int], more: Set[int]) -> None:
    """Remember more microbatches of a round. No round has so many: a peer that says so does not fill the memory."""
    known |= more
    if len(known) > LONGEST_LIST:
        known.clear()
        known |= more
