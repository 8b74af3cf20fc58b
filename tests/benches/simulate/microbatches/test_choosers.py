"""Other ways to choose, each on its own."""

import random
from collections import Counter

import pytest

from scripts.benches.simulate.microbatches.choosers import Answer, ByChance, Chooser, SwarmQueue
from scripts.benches.simulate.timeline import Timeline
from swarm.types import PeerId, PeerRecord, PeerState

NUM_SAMPLES = 4
ONE, TWO, THREE = (PeerId(f"{number:040x}") for number in (1, 2, 3))


def announce(chooser: Chooser, *peers: PeerId) -> None:
    records = [
        PeerRecord(peer_id=peer, announced_at=0.0, stage=0, endpoint="simulated:1", state=PeerState.SERVING)
        for peer in peers
    ]
    chooser.update(0, records)


def answer(call_seconds: float) -> Answer:
    return Answer(
        num_samples=NUM_SAMPLES, busy_seconds=1.0, link_seconds=0.0, queue_length=0, call_seconds=call_seconds
    )


def shares(chooser: Chooser, num_choices: int) -> Counter[PeerId | None]:
    return Counter(chooser.choose(0, NUM_SAMPLES, ()) for _ in range(num_choices))


def test_swarm_s_queue_gives_shares_in_inverse_proportion_to_the_seconds_of_a_call() -> None:
    chooser = SwarmQueue(Timeline(), random.Random(0))
    announce(chooser, ONE, TWO)
    chooser.succeeded(0, ONE, answer(1.0))
    chooser.succeeded(0, TWO, answer(3.0))
    assert shares(chooser, 400)[ONE] == pytest.approx(300, abs=2)
    announce(chooser, ONE, TWO, THREE)
    chooser.succeeded(0, THREE, answer(1.0))
    assert shares(chooser, 700)[THREE] == pytest.approx(300, abs=2), "a newcomer owes nothing, and has no credit"


def test_chance_is_even_and_never_takes_who_is_excluded_busy_or_has_failed() -> None:
    timeline = Timeline()
    chooser = ByChance(timeline, random.Random(0))
    announce(chooser, ONE, TWO, THREE)
    assert min(shares(chooser, 600).values()) > 150
    chooser.busy(0, ONE, 2.0)
    chooser.failed(0, TWO, is_gone=False)
    assert shares(chooser, 50) == {THREE: 50}
    assert chooser.choose(0, NUM_SAMPLES, {THREE}) is None
    timeline.run(3.0)
    assert shares(chooser, 100).keys() == {ONE, THREE}
    timeline.run(6.0)
    assert shares(chooser, 100).keys() == {ONE, TWO, THREE}
