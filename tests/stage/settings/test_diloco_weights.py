"""Inner and outer steps with DiLoCo, against the same steps written out."""

import dataclasses

import pytest
import torch

from swarm.config import Amendment, OuterConfig
from swarm.stage.settings.diloco_weights import dealt
from swarm.stage.stage import weights_of
from swarm.stage.state import digest_of
from swarm.stage.weights import Round, StageWeights
from swarm.training import optim
from swarm.training.samples import Amount
from tests.stage.linear import (
    accumulate,
    assert_same,
    commit_without_steps,
    config_of,
    gradients,
    linear,
    overlapping,
    recorded,
    values_of,
    weights_in,
)
from tests.support.commits import end_round, state_tensors
from tests.support.locked import OWNER

# -- inner steps -------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_leaves_weights_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(optim, "step", fail)
    weights = weights_in("diloco")
    accumulate(weights, 0)
    weights.require_sound()  # Nothing is due yet.
    with pytest.raises(MemoryError):
        accumulate(weights, 1)
    for ask in (weights.require_sound, weights.step_if_due):
        with pytest.raises(MemoryError):
            ask()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("was_synchronous", [False, True])
def test_inner_steps_are_adamw_on_the_mean_of_every_inner_batch(fused: bool, was_synchronous: bool) -> None:
    options = {"weight_decay": 0.1, "clip_norm": 0.5}
    weights = weights_of(config_of("diloco", **options), linear(), lineage="", fused=fused)
    reference = dict(linear().named_parameters())
    adamw = optim.AdamW(config_of("diloco", **options).optimizer)
    if was_synchronous:
        optim.step(adamw, dict(linear().named_parameters()), gradients(9), 0.1)
        weights.recall(optim.state_tensors(adamw, reference))
    accumulate(weights, *range(6))
    for number in (0, 2, 4):
        mean = {name: (gradients(number)[name] + gradients(number + 1)[name]) / 2 for name in reference}
        norm = sum(float(value.square().sum()) for value in mean.values()) ** 0.5
        clipped = {name: value * min(1.0, 0.5 / norm) for name, value in mean.items()}
        optim.step(adamw, reference, clipped, config_of("diloco", **options).optimizer.learning_rate)
    assert_same(weights.masters, reference)
    assert_same(weights.version.parameters, reference)
    assert (weights.round_samples, weights.buckets.num_samples) == (12, 0)


def test_a_full_bucket_waits_for_the_tentative_while_others_take_their_steps() -> None:
    """Every step takes one inner batch, whichever batches had to wait and in whichever order they become ready."""
    weights, events = recorded()
    late = weights.buckets.open()
    late.num_tentative = 1
    accumulate(weights, *range(5))
    assert events.taken == [(1, 4)], "the second batch was ready before the first"
    assert (weights.round_samples, weights.buckets.num_samples) == (4, 6)
    late.num_tentative = 0
    weights.step_if_due()
    assert events.taken == [(1, 4), (0, 4)]
    assert (weights.round_samples, weights.buckets.num_samples) == (8, 2)


def test_what_is_taken_out_of_a_full_bucket_is_made_up_for_before_its_step() -> None:
    weights, events = recorded()
    first = weights.buckets.open()
    first.num_tentative = 2
    accumulate(weights, *range(3))
    first.take_out([2 * gradient for gradient in gradients(0).values()], Amount(2, 2))
    first.num_tentative = 0
    weights.step_if_due()
    assert events.taken == [], "half a batch is left of it"
    assert weights.buckets.open() is first
    accumulate(weights, 0)
    assert events.taken == [(0, 4)]
    assert weights.buckets.num_samples == 2


def test_versions_in_use_are_bounded_and_no_batch_grows_meanwhile() -> None:
    """With a staleness of one there are the newest version and two older ones, and no fourth."""
    weights, events = recorded()
    late = weights.version
    late.users = 1
    accumulate(weights, 0)
    accumulate(weights, 1)
    second = weights.version
    second.users = 1
    accumulate(weights, *range(2, 6))
    assert events.taken == [(0, 4), (1, 4)], "the third step waits"
    assert weights.buckets.num_samples == 4
    late.users = 0
    weights.step_if_due()
    assert events.taken == [(0, 4), (1, 4), (2, 4)]


def test_the_inner_rate_counts_what_the_other_members_do_meanwhile() -> None:
    weights = weights_in("diloco", learning_rate=1.0, warmup_samples=99)
    weights.round.num_members, weights.round.run_samples = 3, 10
    assert weights.learning_rate == pytest.approx(0.11)
    accumulate(weights, *range(2))
    assert weights.learning_rate == pytest.approx(0.11 + 0.12)


# -- DiLoCo rounds -----------------------------------------------------------------------------------------------------


def test_diloco_commits_are_nesterov_on_the_anchor() -> None:
    """DiLoCo: v <- mu v + g; theta <- theta - lr (g + mu v), from the anchor and not from the inner weights."""
    weights = weights_in("diloco")
    anchor = values_of(weights.version.parameters)
    velocity = {name: torch.zeros_like(value) for name, value in anchor.items()}
    for number in range(3):
        for inner in range(4):
            accumulate(weights, 10 * number + inner)
        contribution = weights.contribute().tensors
        assert weights.round_samples == 8
        assert not any(value.requires_grad for value in contribution.values())
        assert_same(contribution, {name: anchor[name] - weights.masters[name] for name in anchor})
        average = {name: value + 0.01 * gradients(number)[name] for name, value in contribution.items()}
        end_round(weights, average, num_members=2)
        for name in anchor:
            velocity[name] = 0.9 * velocity[name] + average[name]
            anchor[name] = anchor[name] - 0.7 * (average[name] + 0.9 * velocity[name])
        assert_same(weights.masters, anchor)
        assert_same(weights.version.parameters, anchor)
        assert weights.version.anchor_round == number + 1
        assert weights.anchored(number + 1) is weights.version


def test_without_overlap_a_closed_round_takes_no_inner_step_until_it_commits_or_reopens() -> None:
    weights = overlapping(0)
    accumulate(weights, *range(2))
    contribution, version = weights.contribute().tensors, weights.version
    accumulate(weights, *range(2, 4))
    assert weights.version is version
    assert weights.buckets.num_samples == 4
    assert_same(weights.contribute().tensors, contribution)
    weights.reopen()
    assert weights.version is not version
    assert weights.round_samples == 8


def test_a_round_that_stays_closed_for_long_takes_steps_one_after_the_other() -> None:
    weights = overlapping(0)
    accumulate(weights, *range(2))
    weights.contribute()
    accumulate(weights, *range(2, 6))
    for num_left in (4, 0):
        weights.train_on()
        assert weights.buckets.num_samples == num_left
    weights.train_on()
    accumulate(weights, *range(6, 10))
    assert weights.buckets.num_samples == 4, "what is not due yet is taken later"
    commit_without_steps(weights)
    weights.step_if_due()
    weights.train_on()
    weights.contribute()
    accumulate(weights, *range(10, 12))
    assert weights.buckets.num_samples == 4, "the next round is like any other"


def test_what_was_learnt_during_an_exchange_is_carried_over_to_the_new_anchor() -> None:
    weights = overlapping(1)
    anchor = values_of(weights.masters)
    accumulate(weights, *range(2))
    closing = weights.contribute()
    at_closing = values_of(weights.masters)
    accumulate(weights, *range(2, 6))
    assert weights.buckets.num_samples == 4, "one step at most while the round is exchanged"
    change = {name: weights.masters[name].detach() - at_closing[name] for name in anchor}
    assert any(bool(value.any()) for value in change.values())
    # A second closing includes what was learnt meanwhile, and its result is the one that is committed here.
    average = {name: 0.5 * value for name, value in closing.tensors.items()}
    end_round(weights, average, num_samples=8, num_members=2)
    assert weights.version.anchor_round is None
    weights.step_if_due()
    moved = {name: anchor[name] - 0.7 * 1.9 * average[name] for name in anchor}
    new_anchor = weights.anchor(1)
    assert new_anchor is not None
    assert_same(new_anchor, moved)
    assert_same(weights.anchored(1).parameters, moved)
    assert_same(weights.anchored(0).parameters, anchor)
    # The steps of the backlog were taken at once, after the batches that were carried over.
    assert weights.round_samples == 8
    assert weights.buckets.num_samples == 0


@pytest.mark.parametrize(("decided", "is_named"), [(0, True), (1, True), (1, False)])
def test_what_was_learnt_after_the_closing_that_is_decided_is_carried_over(decided: int, is_named: bool) -> None:
    """It is the next contribution. The result may be that of an earlier closing, or name none, which is the newest."""
    weights = overlapping(1)
    closings, values = [], []
    for number in range(2):
        accumulate(weights, 2 * number)
        accumulate(weights, 2 * number + 1)
        closings.append(weights.contribute())
        values.append(values_of(weights.masters))
        weights.reopen()
    accumulate(weights, 4, 5)
    change = {name: weights.masters[name].detach() - value for name, value in values[decided].items()}
    end_round(
        weights, closings[decided].tensors, num_samples=8, closing=closings[decided].closing if is_named else None
    )
    assert weights.round_samples == (8, 4)[decided]
    assert_same(weights.contribute().tensors, {name: -value for name, value in change.items()})


def test_fragments_are_averaged_in_turn_and_weighed_by_what_is_new_to_them() -> None:
    weights = overlapping(0, num_fragments=2)
    start = values_of(weights.masters)
    samples = []
    for round_number in range(4):
        accumulate(weights, *range(2 * round_number, 2 * round_number + 2))
        before = values_of(weights.masters)
        closing = weights.contribute()
        name, other = ("weight", "bias") if round_number % 2 == 0 else ("bias", "weight")
        assert list(closing.tensors) == [name]
        assert closing.round_samples == 4
        samples.append(closing.num_samples)
        zero = {name: torch.zeros_like(closing.tensors[name])}
        end_round(weights, zero, num_samples=4)
        # This fragment is back at its anchor, which an average of zero does not move. The other fragment goes on
        # undisturbed.
        torch.testing.assert_close(weights.masters[name].detach(), start[name])
        assert torch.equal(weights.masters[other].detach(), before[other])
    assert samples == [4, 8, 8, 8]


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_diloco_keeps_anchors_and_momentum_on_the_cpu_wherever_it_trains(device: str) -> None:
    """The outer step is taken on the CPU too, so equal averages give the same state, bit by bit."""
    elsewhere, here = weights_of(config_of("diloco"), linear().to(device), lineage=""), weights_in("diloco")
    for number in range(3):
        for weights in (elsewhere, here):
            for inner in range(2):
                summed = [2 * g.to(weights.masters["bias"].device) for g in gradients(inner).values()]
                weights.buckets.open().add(summed, Amount(2, 2))
                weights.step_if_due()
            assert all(value.device.type == "cpu" for value in weights.contribute().tensors.values())
            end_round(weights, gradients(10 + number), num_samples=4)
        assert digest_of(elsewhere.state()) == digest_of(here.state())
    newcomer = weights_of(config_of("diloco"), linear(seed=1).to(device), lineage="")
    newcomer.install(state_tensors(here), Round(number=3))
    assert digest_of(newcomer.state()) == digest_of(here.state())
    for weights in (elsewhere, newcomer):
        trained = [
            *weights.masters.values(),
            *weights.version.parameters.values(),
            *weights.buckets.open().sums.values(),
        ]
        assert {tensor.device.type for tensor in trained} == {device}
        anchor = weights.anchor(3)
        assert anchor is not None
        state = weights.state()
        assert {tensor.device.type for tensor in [*anchor.values(), *state.values()]} == {"cpu"}
        assert sum(name.startswith("outer/") for name in state) == 2
        assert_same(dict(weights.masters), {name: value.to(device) for name, value in anchor.items()})


def _away(num_fragments: int = 1) -> tuple[StageWeights, dict[str, torch.Tensor]]:
    """A peer that takes two inner steps of 4 samples each in round 1, and the change of its weights by these steps."""
    weights = overlapping(0, num_fragments)
    commit_without_steps(weights)
    anchor = values_of(weights.masters)
    accumulate(weights, *range(4))
    learnt = {name: value - anchor[name] for name, value in values_of(weights.masters).items()}
    assert all(bool(value.any()) for value in learnt.values())
    return weights, learnt


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_who_was_left_out_of_a_round_keeps_what_it_has_learnt(num_fragments: int) -> None:
    weights, learnt = _away(num_fragments)
    others = overlapping(0, num_fragments)
    for _ in range(2):
        commit_without_steps(others)
    commit_without_steps(weights, contributed=False)
    assert weights.version.anchor_round is None
    assert digest_of(weights.state()) == digest_of(others.state())
    assert_same(
        dict(weights.masters), {name: value + learnt[name] for name, value in values_of(others.masters).items()}
    )
    assert weights.round.stepped.samples == 8
    closing = weights.contribute()
    assert (closing.num_samples, closing.round_samples) == (8, 8)
    for name, value in closing.tensors.items():
        torch.testing.assert_close(value, -learnt[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_who_was_away_keeps_what_it_has_learnt_on_top_of_the_state_that_it_takes_over(num_fragments: int) -> None:
    weights, learnt = _away(num_fragments)
    accumulate(weights, 9)
    others = overlapping(0, num_fragments)
    for _ in range(4):
        commit_without_steps(others)
    weights.install(state_tensors(others), Round(number=4), carry=True)
    assert weights.version.anchor_round is None
    assert digest_of(weights.state()) == digest_of(others.state())
    assert_same(
        dict(weights.masters), {name: value + learnt[name] for name, value in values_of(others.masters).items()}
    )
    assert_same(weights.version.parameters, dict(weights.masters))
    assert (weights.round.stepped.samples, weights.buckets.num_samples) == (8, 0)
    for _ in range(num_fragments):
        closing = weights.contribute()
        assert closing.num_samples == 8
        for name, value in closing.tensors.items():
            torch.testing.assert_close(value, -learnt[name], rtol=0, atol=1e-6)
        commit_without_steps(weights)
    assert weights.contribute().num_samples == 0, "it counts once"


@pytest.mark.parametrize("moment", ["commit", "install"])
def test_who_has_not_stepped_yet_in_this_round_keeps_what_no_round_of_its_fragment_has_averaged(moment: str) -> None:
    weights, learnt = _away(num_fragments=2)
    others = overlapping(0, num_fragments=2)
    for _ in range(3):
        commit_without_steps(others)
    # Round 1 averages the fragment with the bias, and what this peer has learnt of it. The fragment with the weight
    # follows in round 2.
    commit_without_steps(weights)
    assert weights.round.stepped.samples == 0
    if moment == "commit":
        commit_without_steps(weights, contributed=False)
    else:
        weights.install(state_tensors(others), Round(number=3), carry=True)
    assert digest_of(weights.state()) == digest_of(others.state())
    expected = values_of(others.masters)
    expected["weight"] += learnt["weight"]
    assert_same(dict(weights.masters), expected)
    assert_same(weights.version.parameters, expected)
    assert weights.round.stepped.samples == 0, "they have counted towards round 1"
    assert weights.contribute().num_samples == 0
    commit_without_steps(weights)
    closing = weights.contribute()
    assert (closing.num_samples, closing.round_samples) == (8, 0)
    for name, value in closing.tensors.items():
        torch.testing.assert_close(value, -learnt[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("moment", ["commit", "install"])
def test_who_went_astray_keeps_nothing(moment: str) -> None:
    weights, _ = _away()
    others = overlapping(0)
    for _ in range(2):
        commit_without_steps(others)
    weights.masters["bias"].data[0] = float("nan")
    if moment == "commit":
        commit_without_steps(weights, contributed=False)
    else:
        weights.install(state_tensors(others), Round(number=2), carry=True)
    assert_same(dict(weights.masters), dict(others.masters))
    assert weights.version.anchor_round == weights.round.number
    assert weights.round.stepped.samples == 0
    assert weights.contribute().num_samples == 0


def test_fragments_deal_out_whole_layer_groups() -> None:
    names = ["embedding.weight", "layers.0.a", "layers.0.b", "layers.1.a", "layers.10.a", "head.norm", "head.weight"]
    assert dealt(names, 2) == [
        ["embedding.weight", "layers.1.a", "head.norm", "head.weight"],
        ["layers.0.a", "layers.0.b", "layers.10.a"],
    ]
    with pytest.raises(ValueError, match="only 5 layer groups"):
        dealt(names, 6)


def test_inner_steps_go_by_the_amendments_of_their_round_and_the_outer_step_by_those_of_its_result() -> None:
    """Inner steps keep what AdamW remembers."""
    config = dataclasses.replace(
        config_of("diloco", learning_rate=0.1), outer=OuterConfig(learning_rate=1.0, momentum=0.0),
        owner=OWNER.authority.fingerprint,
    )  # fmt: skip
    weights = weights_of(config, linear(), lineage="")
    settings = ["optimizer.learning_rate=0.02", "outer.learning_rate=0.5"]
    weights.timeline.add([Amendment.sign(OWNER, weights.timeline, 1, settings).text])
    reference, adamw = values_of(dict(linear().named_parameters())), optim.AdamW(config.optimizer)
    for number, (rate, outer_rate, amended) in enumerate([(0.1, 1.0, ""), (0.02, 0.5, weights.timeline.last)]):
        anchor = values_of(weights.masters)
        accumulate(weights, 2 * number, 2 * number + 1)
        pair = gradients(2 * number), gradients(2 * number + 1)
        optim.step(adamw, reference, {name: (pair[0][name] + pair[1][name]) / 2 for name in reference}, rate)
        assert_same(weights.masters, reference)
        end_round(weights, weights.contribute().tensors, amended=amended)
        for name, value in reference.items():
            stepped = anchor[name] - outer_rate * (anchor[name] - value)
            torch.testing.assert_close(weights.masters[name].detach(), stepped)
        reference = values_of(weights.masters)
