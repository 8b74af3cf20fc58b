"""The ledger has every id once, with its state."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm.stage.ledger import EntryState, Ledger
from swarm.types import LARGEST_COUNT


def _ledger(*committed: tuple[int, int], keep: bool = False) -> Ledger[str]:
    ledger: Ledger[str] = Ledger()
    for microbatch, round_number in committed:
        ledger.begin(microbatch, round_number, f"computation {microbatch}")
        ledger.accumulated(microbatch)
        ledger.commit(microbatch, round_number, keep_computation=keep)
    return ledger


def test_a_committed_entry_keeps_its_computation_where_it_may_be_taken_out_again() -> None:
    entry = _ledger((1, 0), keep=True).find(1)
    assert entry is not None
    assert entry.computation == "computation 1"


def test_committed_and_uncommitted_are_by_round() -> None:
    ledger = _ledger((1, 0), (2, 1), (3, 1))
    ledger.begin(4, 1, "running")
    ledger.begin(5, 2, "running")
    assert ledger.committed(1) == {2, 3}
    assert [entry.microbatch for entry in ledger.uncommitted(1)] == [4]
    assert [entry.microbatch for entry in ledger.uncommitted()] == [4, 5]


def test_the_highest_id_survives_forgetting_and_pruning() -> None:
    ledger = _ledger((9, 0), (3, 0))
    ledger.forget(9)
    ledger.prune(before_round=1)
    assert (len(ledger), ledger.highest_microbatch) == (0, 9)
    assert Ledger[str]().highest_microbatch == -1
    ledger.saw(LARGEST_COUNT + 1)
    assert ledger.highest_microbatch == LARGEST_COUNT, "what may be reported"


class _LedgerModel(RuleBasedStateMachine):
    """Compares with plain sets: an id is always in one state, and a round's commits are exactly those made."""

    ids = st.integers(0, 5)

    def __init__(self) -> None:
        super().__init__()
        self.ledger: Ledger[int] = Ledger()
        self.states: dict[int, tuple[EntryState, int]] = {}
        self.round = 0

    @rule(microbatch=ids)
    def begin(self, microbatch: int) -> None:
        if microbatch not in self.states:
            self.ledger.begin(microbatch, self.round, microbatch)
            self.states[microbatch] = (EntryState.RUNNING, self.round)

    @rule(microbatch=ids)
    def advance(self, microbatch: int) -> None:
        state, _ = self.states.get(microbatch, (None, 0))
        if state is EntryState.RUNNING:
            self.ledger.accumulated(microbatch)
            self.states[microbatch] = (EntryState.TENTATIVE, self.states[microbatch][1])
        elif state is EntryState.TENTATIVE:
            self.ledger.commit(microbatch, self.round, keep_computation=False)
            self.states[microbatch] = (EntryState.COMMITTED, self.round)

    @rule(microbatch=ids)
    def forget(self, microbatch: int) -> None:
        self.ledger.forget(microbatch)
        self.states.pop(microbatch, None)

    @precondition(lambda self: self.round < 5)
    @rule()
    def next_round(self) -> None:
        self.round += 1
        self.ledger.prune(self.round - 1)
        self.states = {
            microbatch: (state, round_number)
            for microbatch, (state, round_number) in self.states.items()
            if state is not EntryState.COMMITTED or round_number >= self.round - 1
        }

    @invariant()
    def agrees(self) -> None:
        assert len(self.ledger) == len(self.states)
        for microbatch, (state, round_number) in self.states.items():
            entry = self.ledger.find(microbatch)
            assert entry is not None
            assert (entry.state, entry.round) == (state, round_number)
        for number in range(self.round + 1):
            expected = {m for m, state in self.states.items() if state == (EntryState.COMMITTED, number)}
            assert self.ledger.committed(number) == expected


_LedgerModel.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestLedgerModel = _LedgerModel.TestCase
