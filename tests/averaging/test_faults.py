"""A scripted fault at every moment of a round. Nothing is mixed, nothing counts twice, and training goes on.

tests/averaging/witness.py has what must hold after every trial, and tests/averaging/faults.py has the trials.
"""

import functools
import itertools
import logging
import random
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swarm.config import Quorum
from tests.averaging.faults import OF_MESSAGE, Event, Fault, Kind, Scenario, Trial
from tests.support.virtual_time import run

VARIANTS = [
    ("synchronous", "available", "fp32"), ("diloco", "majority", "fp32"),
    ("synchronous", "majority", "fp16"), ("diloco", "available", "fp16"),
]  # fmt: skip
"""Combinations of setting, quorum and codec. Successive trials use them in turn."""

Case = tuple[Scenario, tuple[Fault, ...]]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Silence warnings, which faults are meant to cause; an error would be the program's."""
    caplog.set_level(logging.ERROR)
    yield
    assert not caplog.records


@functools.cache
def events_of(scenario: Scenario) -> list[Event]:
    """All events of a round without faults."""
    trial = Trial(scenario)
    run(trial.run())
    return sorted(trial.events, key=str)


def faults_of(scenario: Scenario, kind: Kind) -> list[Fault]:
    """One kind of fault at every event, to every victim."""
    events = events_of(scenario)
    if kind in OF_MESSAGE:
        return [Fault(kind, event) for event in events if event.is_message]
    return [Fault(kind, event, victim) for event, victim in itertools.product(events, scenario.numbers)]


def in_turn(size: int, kind: Kind, stride: int) -> Iterator[Case]:
    """Every n-th fault of one kind, each in the next variant."""
    scenarios = itertools.cycle(Scenario(size, *variant) for variant in VARIANTS)
    first = Scenario(size, *VARIANTS[0])
    for scenario, fault in zip(scenarios, faults_of(first, kind)[::stride], strict=False):
        yield scenario, (fault,)


def survive(cases: Iterable[Case]) -> list[Trial]:
    """Run the trials; raises for the first promise that is broken, and says where."""
    trials = []
    for scenario, faults in cases:
        trial = Trial(scenario, faults)
        try:
            run(trial.run())
        except Exception as error:
            raise AssertionError(f"{scenario}, {', '.join(map(str, faults))}: {error}") from error
        trials.append(trial)
    assert trials
    return trials


@pytest.mark.parametrize("kind", list(Kind))
def test_two_members_and_faults(kind: Kind) -> None:
    # The stride has no common divisor with the numbers of peers, moments and variants.
    survive(in_turn(2, kind, stride=29))


@pytest.mark.parametrize("kind", list(Kind))
def test_three_members_and_faults(kind: Kind) -> None:
    survive(in_turn(3, kind, stride=101))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
def test_every_fault_at_every_event(variant: tuple[str, str, str], size: int, kind: Kind) -> None:
    scenario = Scenario(size, *variant)
    survive((scenario, (fault,)) for fault in faults_of(scenario, kind))


@st.composite
def pairs_of_faults(draw: st.DrawFn) -> Case:
    """Two faults in a group of five. The second one may come while the first one lasts, or the first one may prevent
    it."""
    scenario = Scenario(
        5, draw(st.sampled_from(["synchronous", "diloco"])), draw(st.sampled_from(["available", "majority"])),
        draw(st.sampled_from(["fp32", "fp16"])),
    )  # fmt: skip
    faults = []
    for _ in range(2):
        kind = draw(st.sampled_from(Kind))
        events = [event for event in events_of(scenario) if event.is_message or kind not in OF_MESSAGE]
        seconds = draw(st.sampled_from([0.1, 0.35, 1.2, 2.5]))
        victim = 0 if kind in OF_MESSAGE else draw(st.sampled_from(scenario.numbers))
        faults.append(Fault(kind, draw(st.sampled_from(events)), victim, seconds))
    assume(faults[0] != faults[1])
    return scenario, tuple(faults)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=500)
@given(case=pairs_of_faults())
def test_five_members_and_two_faults(case: Case) -> None:
    survive([case])


def many_losses(quorum: Quorum, seed: int) -> Case:
    """Messages that get lost or come late at random, while two of five members are killed and another one freezes."""
    scenario, rng = Scenario(5, "synchronous", quorum), random.Random(seed)
    events = events_of(scenario)
    messages = rng.sample([event for event in events if event.is_message], 20)
    victims = zip((Kind.KILL, Kind.FREEZE, Kind.KILL), rng.sample(scenario.numbers, 3), strict=True)
    faults = [Fault(rng.choice(OF_MESSAGE), event) for event in messages]
    faults += [Fault(kind, rng.choice(events), victim) for kind, victim in victims]
    return scenario, tuple(rng.sample(faults, len(faults)))


@pytest.mark.slow
@pytest.mark.parametrize("quorum", ["available", "majority"])
def test_five_members_and_many_losses(quorum: Quorum) -> None:
    survive(many_losses(quorum, seed) for seed in range(12))


def test_a_stale_leader_wakes_to_a_round_that_others_committed() -> None:
    """The leader's messages arrive then. They are refused, or they concern the same result that the others
    committed."""
    scenario = Scenario(3, "synchronous", "majority")
    faults = [fault for fault in faults_of(scenario, Kind.TAKEOVER) if fault.victim == 1]
    trials = survive((scenario, (fault,)) for fault in faults[::6])
    assert sum(trial.was_overtaken for trial in trials) == len(trials)


# -- several stages --------------------------------------------------------------------------------------------------

TWO_STAGES = [Scenario(2, "synchronous", quorum, num_stages=2) for quorum in ("available", "majority")]


@pytest.mark.parametrize("kind", list(Kind))
def test_two_stages_and_faults(kind: Kind) -> None:
    faults = faults_of(TWO_STAGES[0], kind)[::251]
    survive((scenario, (fault,)) for scenario, fault in zip(itertools.cycle(TWO_STAGES), faults, strict=False))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("scenario", TWO_STAGES, ids=lambda scenario: scenario.quorum)
def test_two_stages_and_every_fault_at_every_event(scenario: Scenario, kind: Kind) -> None:
    survive((scenario, (fault,)) for fault in faults_of(scenario, kind))
