"""The findings about lines to other peers: judgements of made-up figures, and measurements with a real peer."""

import pytest

from peers.doctor import line
from peers.doctor.finding import Finding, State
from swarm import config as configs
from swarm.rpc.probe import Distance, Rates
from swarm.types import PeerId
from tests.routing.records import id_of

CONFIG = configs.load_preset("small")


def _at(*offsets: float, seconds: float = 0.02) -> dict[PeerId, Distance | str]:
    return {
        id_of(number): Distance(round_trip_seconds=seconds, clock_offset_seconds=offset)
        for number, offset in enumerate(offsets)
    }


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        (_at(4.0), State.WRONG, "4.0 s behind 1 peer's: turn on time synchronisation; 3 s are allowed"),
        (_at(-9.0, -9.2), State.WRONG, "9.1 s ahead of those of 2 peers"),
        (_at(0.0, 0.1, 3600.0), State.FINE, "within 0.1 s"),
        ({id_of(9): "gpu-9 at 192.0.2.9:1: it is gone"}, State.NOT_CHECKED, "no peer to compare it with answers"),
        ({}, State.NOT_CHECKED, "no peer to compare it with answers"),
    ],
    ids=["behind", "ahead", "one of theirs is wrong", "nobody answers", "nobody is there"],
)
def test_clocks(found: line.Distances, state: State, words: str) -> None:
    _is(line.judge_clock(found), state, words)


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        (
            {**_at(0.0), id_of(9): "gpu-9 at 192.0.2.9:1: it is gone"},
            State.FINE,
            "1 of 2 that were asked answer; gpu-9 at 192.0.2.9:1: it is gone",
        ),
        (
            {id_of(9): "gpu-9 at 192.0.2.9:1: it is gone"},
            State.WRONG,
            "none answers (gpu-9 at 192.0.2.9:1: it is gone): check that this machine",
        ),
        ({}, State.NOT_CHECKED, "no other peer serves"),
    ],
)
def test_peers(found: line.Distances, state: State, words: str) -> None:
    _is(line.judge_peers(found), state, words)


@pytest.mark.parametrize(
    ("passing", "state", "words"),
    [
        ([True, False], State.FINE, "of any size, to 1 of 2 peers"),
        ([False], State.WRONG, "1 peer asked: short messages pass on the way there, and none that takes"),
        ([], State.NOT_CHECKED, "no peer is free to try it with"),
    ],
)
def test_packets(passing: list[bool], state: State, words: str) -> None:
    _is(line.judge_packets(passing), state, words)


def test_rates() -> None:
    """A microbatch of `small` brings 8 x 256 x 384 numbers of 4 bytes to a stage: 3.1 MB."""
    _is(line.judge_rates("the line is in use", CONFIG), State.NOT_CHECKED, "the line is in use")
    fast, slow = Rates(up_per_second=12.5e6, down_per_second=25e6), Rates(up_per_second=1e5, down_per_second=25e6)
    seconds = line.activation_bytes(CONFIG) / 12.5e6
    _is(
        line.judge_rates(fast, CONFIG),
        State.FINE,
        f"100 Mbit/s up, 200 down: a microbatch's activations take {seconds:.1f} s",
    )
    _is(line.judge_rates(slow, CONFIG), State.WRONG, "0.8 Mbit/s up, 200 down")


def _is(finding: Finding, state: State, words: str) -> None:
    assert finding.state is state, finding
    assert words in finding.text
