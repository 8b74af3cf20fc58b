"""What the other peers of a stage have reported about the present round: the microbatches of each, and those lost with
a peer.

Part of a roster (members/roster). Pure.
"""

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field

from swarm.averaging import messages
from swarm.averaging.leading.group import Ballot
from swarm.averaging.messages import Standing
from swarm.rpc.bounds import LONGEST_LIST
from swarm.training.round_member import Progress
from swarm.types import PeerId


@dataclass(frozen=True, kw_only=True)
class Report:
    """The newest report of a member."""

    progress: Progress
    prepared: Ballot | None
    heard_at: float

    @property
    def standing(self) -> Standing:
        """The sender's standing."""
        return messages.standing_of(self.progress)


@dataclass(eq=False)
class RoundReports:
    """The reports about the present round; begun anew with each round."""

    round_microbatches: int | None
    """The number of microbatches of a synchronous round; None with DiLoCo."""
    current: dict[PeerId, Report] = field(default_factory=dict, init=False)
    """The newest report of each peer that is not suspected."""
    last: dict[PeerId, Report] = field(default_factory=dict, init=False)
    """The newest report of each peer that has reported in this round, even if the peer is gone."""
    _counted: set[int] = field(default_factory=set, init=False)
    _lost: set[int] = field(default_factory=set, init=False)

    def named(self, round_number: int, gaps: Iterable[int]) -> frozenset[int]:
        """Read the microbatches of a round that a peer names; with DiLoCo none, because only their number matters."""
        size = self.round_microbatches
        if size is None:
            return frozenset()
        return messages.unpack_indices_of(range(round_number * size, (round_number + 1) * size), gaps)

    def hear(self, peer_id: PeerId, report: Report) -> None:
        """Note a peer's report."""
        before = self.last.get(peer_id)
        if before is not None and before.standing == report.standing:
            # The peer was started again, or gave up microbatches that others had as well.
            _add(self._lost, before.progress.committed - report.progress.committed)
        self.count(report.progress.committed)
        self.last[peer_id] = report

    def count(self, committed: Set[int]) -> None:
        """Note that some peer has committed these microbatches; the peer may be gone since."""
        _add(self._counted, committed)

    def lose(self, peer_id: PeerId) -> None:
        """Note that a peer is gone, and that what it had committed in this round is lost."""
        if (last := self.last.pop(peer_id, None)) is not None:
            _add(self._lost, last.progress.committed)

    def begin_round(self) -> None:
        """Forget the reports about the last round, but not which peers are there."""
        self.last.clear()
        self._counted.clear()
        self._lost.clear()

    def forget_others(self, known: Collection[PeerId]) -> None:
        """Forget the reports of peers that are not in `known`."""
        self.current = {peer: report for peer, report in self.current.items() if peer in known}
        self.last = {peer: report for peer, report in self.last.items() if peer in known}

    @property
    def counted(self) -> frozenset[int]:
        """The microbatches that any peer has committed in this round, even if that peer is gone."""
        return frozenset(self._counted)

    @property
    def lost(self) -> frozenset[int]:
        """The microbatches that were lost with a peer, and that no other peer has reported."""
        return frozenset(self._lost.difference(*(last.progress.committed for last in self.last.values())))


def _add(known: set[int], more: Set[int]) -> None:
    """Add microbatches to `known`, up to LONGEST_LIST, so that no peer can fill the memory."""
    known |= more
    if len(known) > LONGEST_LIST:
        known.clear()
        known |= more
