"""Trainers that lie or are slow. No holder of a token can block a run, and each gets its share of a round."""

import statistics
from collections.abc import Collection

import pytest

from swarm.config import RoundsConfig, RunConfig
from swarm.pipeline.leases import GATHER_SECONDS
from swarm.pipeline.trainers import FIRST_PATIENCE_SECONDS, LEAST_PATIENCE_SECONDS, PAUSE_SECONDS, Trainer, Trainers
from swarm.types import Block
from tests.pipeline.leader import SIZE, SYNCHRONOUS, Leader
from tests.support.manual_clock import ManualClock


class _Race:
    """An honest trainer, and a holder of another token that tries to keep rounds from ending."""

    def __init__(self, strategy: str, config: RunConfig, stage: int = 0) -> None:
        self.leader = Leader(config, Block(stage))
        self.leader.is_asked = False
        self.size = config.microbatches_per_round
        self.strategy = strategy
        self.num_names = 0
        self.lied_about: list[int] = []

    def run_round(self) -> float:
        """Run a round to its end, and return its seconds. The honest trainer needs 0.25 s for two microbatches."""
        leader, began_at, quiet_seconds = self.leader, self.leader.clock.monotonic(), 0.0
        ids = range(leader.round * self.size, (leader.round + 1) * self.size)
        held: list[int] = []
        while not leader.committed >= set(ids):
            self._lie(ids, quiet_seconds)
            held += leader.give("honest", 2 - len(held), holding=held, quiet_seconds=quiet_seconds)
            leader.clock.advance(0.25)
            leader.committed |= set(held)
            quiet_seconds = 0.0 if held else quiet_seconds + 0.25
            held = []
            assert leader.clock.monotonic() - began_at < 3600, "it never ends"
        leader.round, leader.committed, self.lied_about = leader.round + 1, set(), []
        return leader.clock.monotonic() - began_at

    def _lie(self, ids: range, quiet_seconds: float) -> None:
        for _ in range(3):
            self.num_names += self.strategy != "holds its share"
            wanted = 99
            said: dict[str, Collection[int]] = {}
            match self.strategy:
                case "names all":
                    said = {"holding": ids}
                case "says it has run all":
                    said = {"acknowledged": ids}
                case "holds its share" | "holds its share under many names":
                    said = {"holding": self.lied_about}
                case "waits for the last":
                    said = {"holding": self.lied_about}
                    wanted = 99 if len(self.leader.committed) >= self.size - 4 else 0
                case "gives back and asks again":
                    said, self.lied_about = {"released": self.lied_about}, []
            liar = Trainer("liar", f"liar {self.num_names % 5}")
            self.lied_about += self.leader.give(liar, wanted, quiet_seconds=quiet_seconds, **said)


_STRATEGIES = [
    "names all", "says it has run all", "holds its share", "holds its share under many names", "waits for the last",
    "gives back and asks again", "forgets and asks again",
]  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_no_bearer_of_a_token_holds_up_a_run_for_good(strategy: str, stage: int) -> None:
    race = _Race(strategy, RunConfig(rounds=RoundsConfig(setting="synchronous", round_samples=256)), stage)
    first, *others = (race.run_round() for _ in range(6))
    assert first < FIRST_PATIENCE_SECONDS + 30.0
    assert statistics.mean(others) < LEAST_PATIENCE_SECONDS + 5.0


def test_a_trainer_has_what_it_was_granted_whatever_it_names() -> None:
    leader = Leader(SYNCHRONOUS)
    assert leader.give("liar", 0, holding=range(SIZE)) == []
    assert leader.give("honest", 2) == [0, 1]


def test_a_new_leader_believes_nobody_a_whole_round_and_the_modest_first() -> None:
    leader = Leader(SYNCHRONOUS, led_seconds=0.0)
    for number in range(20):
        leader.ask(Trainer("liar", f"liar {number}"), 0, holding=range(SIZE))
    leader.ask("honest", 0, holding=[0, 1])
    leader.clock.advance(GATHER_SECONDS)
    assert leader.give("honest", 9, holding=[0, 1]) == [5], "2, 3 and 4 are the liar's"
    alone = Leader(SYNCHRONOUS, led_seconds=0.0)
    alone.ask("a", 0, holding=range(SIZE))
    alone.clock.advance(GATHER_SECONDS)
    assert alone.give("b", 9) == [3, 4, 5]


def test_all_names_of_a_bearer_have_one_share() -> None:
    leader = Leader(RunConfig(rounds=RoundsConfig(setting="synchronous", round_samples=256)))
    leader.give("honest", 1)
    granted = [leader.give(Trainer("liar", f"liar {number}"), 99) for number in range(50)]
    assert sum(map(len, granted)) <= 16
    assert len(leader.give("honest", 99, holding=[0])) > 0


def test_who_holds_what_others_then_run_has_nothing_for_a_while() -> None:
    leader = Leader(SYNCHRONOUS)
    held = leader.give("slow", 2)
    while mine := leader.give("b", 3):
        leader.committed |= set(mine)
    for _ in range(int(LEAST_PATIENCE_SECONDS / 0.5) + 1):
        leader.clock.advance(0.5)
        leader.ask("slow", 0, holding=held)
    assert leader.give("b", 9) == [0, 1]
    assert leader.give("slow", 1, holding=held) == []
    leader.committed |= {0, 1}
    leader.round = 1
    assert leader.give("slow", 9) == []
    assert leader.give("b", 2) == [6, 7]
    leader.is_asked = False
    for _ in range(int(PAUSE_SECONDS / 0.5)):
        leader.clock.advance(0.5)
        leader.ask("b", 0, holding=[6, 7])
    assert leader.give("slow", 1) == [8]


def test_a_paused_trainer_that_is_alone_goes_on() -> None:
    clock = ManualClock()
    trainers = Trainers(clock)
    alone = Trainer("a", "a")
    trainers.hear(alone)
    trainers.pause("a")
    assert not trainers.is_paused("a")
    trainers.hear(Trainer("b", "b"))
    assert trainers.is_paused("a")
