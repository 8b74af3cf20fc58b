"""The ledger: the state of each microbatch id at a stage peer.

    running     its computation is under way
    tentative   its gradient is accumulated, its answer remembered, and no acknowledgement has come
    committed   acknowledged: it counts

An id that is in the ledger is never accumulated again. Pure bookkeeping; the stage acts on it.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from swarm.types import LARGEST_COUNT

_Computation = TypeVar("_Computation")


class EntryState(StrEnum):
    RUNNING = "running"
    TENTATIVE = "tentative"
    COMMITTED = "committed"


@dataclass(eq=False)
class Entry(Generic[_Computation]):
    """One microbatch that is, or will be, accumulated here.

    Attributes:
        round: the round for which it counts. Before it is committed, this is the round in which it was admitted.
        computation: answers repeats, and can be undone. None once neither can be asked for any more.
    """

    microbatch: int
    round: int
    computation: _Computation | None
    state: EntryState = EntryState.RUNNING


class Ledger(Generic[_Computation]):
    def __init__(self) -> None:
        self._entries: dict[int, Entry[_Computation]] = {}
        self.highest_microbatch = -1
        """The highest id ever seen; another trainer's range may safely begin above it."""

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, microbatch: int) -> Entry[_Computation] | None:
        return self._entries.get(microbatch)

    def begin(self, microbatch: int, round_number: int, computation: _Computation) -> None:
        assert microbatch not in self._entries, "an id is entered once"
        self._entries[microbatch] = Entry(microbatch=microbatch, round=round_number, computation=computation)
        self.saw(microbatch)

    def saw(self, microbatch: int) -> None:
        """Note an id, known here or not. New microbatches must have higher ids. One beyond LARGEST_COUNT, which follows
        from an id that somebody made up, would have all reports of this peer refused."""
        self.highest_microbatch = max(self.highest_microbatch, min(microbatch, LARGEST_COUNT))

    def accumulated(self, microbatch: int) -> None:
        entry = self._entries[microbatch]
        assert entry.state is EntryState.RUNNING
        entry.state = EntryState.TENTATIVE

    def commit(self, microbatch: int, round_number: int, *, keep_computation: bool) -> None:
        """Note that a microbatch was acknowledged. Its computation is kept if it may have to leave the round again."""
        entry = self._entries[microbatch]
        assert entry.state is EntryState.TENTATIVE
        entry.state, entry.round = EntryState.COMMITTED, round_number
        if not keep_computation:
            entry.computation = None

    def forget(self, microbatch: int) -> None:
        """Forget a microbatch that was rolled back, or never accumulated, so that its id may come again."""
        self._entries.pop(microbatch, None)

    def committed(self, round_number: int) -> frozenset[int]:
        return frozenset(
            entry.microbatch
            for entry in self._entries.values()
            if entry.state is EntryState.COMMITTED and entry.round == round_number
        )

    def uncommitted(self, round_number: int | None = None) -> list[Entry[_Computation]]:
        """Entries that are running or tentative, of one round or of all."""
        return [
            entry
            for entry in self._entries.values()
            if entry.state is not EntryState.COMMITTED and (round_number is None or entry.round == round_number)
        ]

    def prune(self, before_round: int) -> None:
        self._entries = {
            microbatch: entry
            for microbatch, entry in self._entries.items()
            if entry.state is not EntryState.COMMITTED or entry.round >= before_round
        }
