"""When a round is complete, in both settings."""

import dataclasses
from collections.abc import Sequence

from swarm.averaging.completion import Completion
from swarm.types import PeerRecord, PeerState
from tests.support.chain import DILOCO, SYNCHRONOUS


def _nobody(stage: int) -> Sequence[PeerRecord]:
    return ()


def _record(stage: int, round_number: int, state: PeerState) -> PeerRecord:
    return PeerRecord(
        peer_id=f"{stage:040x}", stage=stage, announced_at=0.0, endpoint="127.0.0.1:1", state=state, round=round_number
    )


def test_synchronous_wants_every_microbatch_of_the_round() -> None:
    complete = Completion(config=SYNCHRONOUS, stage=0, peers=_nobody)
    size = SYNCHRONOUS.microbatches_per_round
    second = range(size, 2 * size)
    assert complete(1, frozenset(second), 0)
    assert not complete(1, frozenset(second) - {size}, 10**6)
    assert not complete(1, frozenset(range(size)), 10**6)


def test_diloco_wants_the_rounds_samples_whichever_they_are() -> None:
    complete = Completion(config=DILOCO, stage=0, peers=_nobody)
    wanted = DILOCO.rounds.round_samples
    assert complete(7, frozenset(), wanted)
    assert not complete(7, frozenset(range(100)), wanted - 1)


def test_a_stage_that_lost_samples_follows_the_others() -> None:
    """Else its rounds would fall behind theirs for good, and no anchor would be common to all stages."""
    later = [_record(1, 4, PeerState.SERVING)]
    complete = Completion(config=DILOCO, stage=0, peers=lambda stage: later if stage == 1 else ())
    assert complete(3, frozenset(), 1)
    assert not complete(3, frozenset(), 0), "there is nothing to average"
    assert not complete(4, frozenset(), 1), "nobody is ahead"


def test_nobody_who_holds_most_of_a_round_is_left_out_of_it() -> None:
    complete, wanted = Completion(config=DILOCO, stage=0, peers=_nobody), DILOCO.rounds.round_samples
    assert complete(0, frozenset(), wanted, wanted)
    assert not complete(0, frozenset(), wanted, wanted + 1)


def test_a_round_ends_early_with_everybody_or_not_at_all() -> None:
    """Else a newcomer's first step might end it in place of the one that has nearly all of it."""
    later = [_record(1, 4, PeerState.SERVING)]
    complete = Completion(
        config=DILOCO, stage=0, peers=lambda stage: later if stage == 1 else (), is_awaited=lambda number: True
    )
    assert complete(3, frozenset(), 1)
    assert not complete(3, frozenset(), DILOCO.rounds.round_samples - 1, 1)


def test_a_stage_that_another_has_waited_for_goes_on_with_what_it_has() -> None:
    """Else it might get no more: the other one lets a round's worth through, and then none."""
    complete = Completion(config=DILOCO, stage=0, peers=_nobody, is_awaited=lambda number: number == 3)
    assert complete(3, frozenset(), 1)
    assert not complete(3, frozenset(), 0), "there is nothing to average"
    assert not complete(4, frozenset(), 1)
    synchronous = Completion(config=SYNCHRONOUS, stage=0, peers=_nobody, is_awaited=lambda number: True)
    assert not synchronous(0, frozenset({0}), 1)


def test_neither_its_own_stage_nor_who_does_not_serve_pulls_a_stage_along() -> None:
    records = [_record(0, 9, PeerState.SERVING), _record(1, 9, PeerState.LEAVING), _record(2, 9, PeerState.JOINING)]
    complete = Completion(config=DILOCO, stage=0, peers=lambda stage: [r for r in records if r.stage == stage])
    assert not complete(3, frozenset(), 1)


def test_the_rule_of_a_single_stage_is_its_own() -> None:
    config = dataclasses.replace(DILOCO, stages=dataclasses.replace(DILOCO.stages, num_stages=1))
    assert not Completion(config=config, stage=0, peers=_nobody)(0, frozenset(), 1)
