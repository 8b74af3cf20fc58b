"""What weights do in both settings: versions and anchors of the past, and states that newcomers take over."""

import gc
import weakref

import pytest

from swarm.stage.stage import weights_of
from swarm.stage.state import digest_of
from swarm.stage.weights import Round
from tests.stage.linear import accumulate, assert_same, config_of, gradients, linear, values_of, weights_in
from tests.support.commits import end_round, state_tensors


@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
def test_nothing_is_left_of_the_versions_of_past_rounds(setting: str) -> None:
    weights = weights_in(setting)
    past = []
    for number in range(4):
        past.append(weakref.ref(weights.version))
        accumulate(weights, number)
        end_round(weights, weights.contribute().tensors, total_squared_norm=1.0, num_samples=2, lineage=str(number))
    gc.collect()
    assert [version() for version in past[:-1]] == [None] * 3


def test_the_anchors_of_this_round_and_the_one_before_are_kept() -> None:
    weights = weights_in("diloco")
    anchors = []
    for number in range(3):
        anchors.append(values_of(weights.version.parameters))
        for inner in range(2):
            accumulate(weights, 10 * number + inner)
        end_round(weights, weights.contribute().tensors)
    assert weights.anchor(0) is None
    assert weights.anchor(1) is None
    assert weights.anchor(4) is None
    kept = weights.anchor(2)
    assert kept is not None
    assert_same(kept, anchors[2])
    anchor = weights.anchor(3)
    assert anchor is not None
    # There is no second copy of the weights.
    assert all(anchor[name] is value for name, value in weights.version.parameters.items())


@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
def test_a_newcomer_goes_on_exactly_where_the_holder_is(setting: str) -> None:
    holder = weights_in(setting)
    accumulate(holder, *range(2))
    end_round(holder, holder.contribute().tensors, total_squared_norm=1.0, lineage="a")
    accumulate(holder, 7)
    state, digest = state_tensors(holder), digest_of(holder.state())

    newcomer = weights_of(config_of(setting), linear(seed=1), lineage="")
    accumulate(newcomer, 3)
    newcomer.check(state, digest, round_number=1)
    newcomer.install(state, Round(number=1, run_samples=16, lineage="a"))
    assert digest_of(newcomer.state()) == digest
    assert (newcomer.round.number, newcomer.buckets.num_samples) == (1, 0)
    assert newcomer.anchor(0) is None
    average = gradients(8)
    for weights in (holder, newcomer):
        end_round(weights, average, total_squared_norm=1.0, num_members=2, lineage="b")
    assert digest_of(newcomer.state()) == digest_of(holder.state())
    # Other peers are still sent the average.
    assert_same(average, gradients(8))
