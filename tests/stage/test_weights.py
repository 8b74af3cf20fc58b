"""Versions, buckets and steps of a stage's weights, against torch's optimizers in one process."""

import dataclasses
import gc
import weakref
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from swarm.config import AveragingConfig, DataConfig, ModelConfig, OptimizerConfig, RoundsConfig, RunConfig
from swarm.errors import IntegrityError
from swarm.events.kinds import Event, Step
from swarm.stage.buckets import GradientBucket
from swarm.stage.diloco.fragments import dealt
from swarm.stage.settings import weights_of
from swarm.stage.state import digest_of
from swarm.stage.weights import Round, StageWeights
from swarm.training import optim

_INNER_SAMPLES = 4


def _config(setting: str, **optimizer: float | str) -> RunConfig:
    assert setting in ("synchronous", "diloco")
    return RunConfig(
        data=DataConfig(microbatch_size=2),
        rounds=RoundsConfig(
            setting="synchronous" if setting == "synchronous" else "diloco",
            round_samples=16, inner_batch_samples=_INNER_SAMPLES,
        ),
        optimizer=OptimizerConfig(**{"learning_rate": 0.05, "clip_norm": 0.0, **optimizer}),  # type: ignore[arg-type]  # any field
    )  # fmt: skip


def _module(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(3, 4)


class _Steps:
    """Keeps of all events the inner steps: of which bucket, with how many samples."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []

    def write(self, event: Event) -> None:
        if isinstance(event, Step):
            self.taken.append((event.bucket, event.samples))


def _weights(setting: str, **optimizer: float | str) -> StageWeights:
    return weights_of(_config(setting, **optimizer), _module(), lineage="")


def _recorded() -> tuple[StageWeights, _Steps]:
    """With DiLoCo, and the steps that it takes."""
    steps = _Steps()
    return weights_of(_config("diloco"), _module(), lineage="", events=steps), steps


def _gradients(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(p.shape, generator=generator) for name, p in _module().named_parameters()}


def _values(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in parameters.items()}


def _assert_same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name].detach(), right[name].detach(), rtol=1e-6, atol=1e-7, msg=name)


def _accumulate(weights: StageWeights, number: int, num_samples: int = 2) -> GradientBucket:
    """What the backend does with an acknowledged gradient."""
    bucket = weights.buckets.open()
    bucket.add(_gradients(number).values(), num_samples)
    weights.step_if_due()
    return bucket


# -- buckets -----------------------------------------------------------------------------------------------------------


def test_a_bucket_is_a_mean_over_samples_and_gives_back_what_is_taken_out() -> None:
    bucket = _weights("synchronous").buckets.open()
    bucket.add(_gradients(0).values(), 2)
    bucket.add(_gradients(1).values(), 6)
    _assert_same(bucket.mean(), {n: (_gradients(0)[n] + 3 * _gradients(1)[n]) / 4 for n in _gradients(0)})
    bucket.add(_gradients(1).values(), -6)
    assert bucket.num_samples == 2
    for name, value in bucket.mean().items():
        torch.testing.assert_close(value, _gradients(0)[name], rtol=0, atol=1e-6)


def test_the_mean_of_nothing_is_zero() -> None:
    assert all(not value.any() for value in _weights("synchronous").buckets.open().mean().values())


# -- inner steps -------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_leaves_weights_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(optim, "step", fail)
    weights = _weights("diloco")
    _accumulate(weights, 0)
    weights.require_sound()  # Nothing is due yet.
    with pytest.raises(MemoryError):
        _accumulate(weights, 1)
    for ask in (weights.require_sound, weights.step_if_due):
        with pytest.raises(MemoryError):
            ask()


def test_inner_steps_are_adamw_on_the_mean_of_every_inner_batch() -> None:
    options = {"weight_decay": 0.1, "clip_norm": 0.5}
    weights = _weights("diloco", **options)
    reference = dict(_module().named_parameters())
    adamw = optim.AdamW(_config("diloco", **options).optimizer)
    for number in range(6):
        _accumulate(weights, number)
    for number in (0, 2, 4):
        mean = {name: (_gradients(number)[name] + _gradients(number + 1)[name]) / 2 for name in reference}
        norm = sum(float(value.square().sum()) for value in mean.values()) ** 0.5
        clipped = {name: value * min(1.0, 0.5 / norm) for name, value in mean.items()}
        optim.step(adamw, reference, clipped, _config("diloco", **options).optimizer.learning_rate)
    _assert_same(weights.masters, reference)
    _assert_same(weights.version.parameters, reference)
    assert (weights.round_samples, weights.num_unstepped_samples) == (12, 0)


def test_no_step_before_an_inner_batch_is_full() -> None:
    weights = _weights("diloco")
    version = weights.version
    _accumulate(weights, 0)
    assert weights.version is version
    assert weights.num_unstepped_samples == 2


def test_a_full_bucket_waits_for_the_tentative_while_others_take_their_steps() -> None:
    """Every step takes one inner batch, whatever had to wait, and in whatever order batches become ready."""
    weights, events = _recorded()
    late = weights.buckets.open()
    late.num_tentative = 1
    for number in range(5):
        _accumulate(weights, number)
    assert events.taken == [(1, 4)], "the second batch was ready before the first"
    assert (weights.round_samples, weights.num_unstepped_samples) == (4, 6)
    late.num_tentative = 0
    weights.step_if_due()
    assert events.taken == [(1, 4), (0, 4)]
    assert (weights.round_samples, weights.num_unstepped_samples) == (8, 2)


def test_what_is_taken_out_of_a_full_bucket_is_made_up_for_before_its_step() -> None:
    weights, events = _recorded()
    first = weights.buckets.open()
    first.num_tentative = 2
    for number in range(3):
        _accumulate(weights, number)
    first.add(_gradients(0).values(), -2)
    first.num_tentative = 0
    weights.step_if_due()
    assert events.taken == [], "half a batch is left of it"
    assert weights.buckets.open() is first
    _accumulate(weights, 0)
    assert events.taken == [(0, 4)]
    assert weights.num_unstepped_samples == 2


def test_a_bucket_that_was_rolled_back_whole_takes_no_step() -> None:
    weights = _weights("diloco")
    version, closing = weights.version, weights.buckets.open()
    closing.num_tentative = 2
    for number in range(2):
        _accumulate(weights, number)
    for number in range(2):
        closing.add(_gradients(number).values(), -2)
    closing.num_tentative = 0
    weights.step_if_due()
    assert weights.version is version
    assert (weights.round_samples, weights.num_unstepped_samples) == (0, 0)


def test_versions_in_use_are_bounded_and_no_batch_grows_meanwhile() -> None:
    """With a staleness of one: the newest, two older ones for microbatches in their order, and no fourth."""
    weights, events = _recorded()
    late = weights.version
    late.users = 1
    _accumulate(weights, 0)
    _accumulate(weights, 1)
    second = weights.version
    second.users = 1
    for number in range(2, 6):
        _accumulate(weights, number)
    assert events.taken == [(0, 4), (1, 4)], "the third step waits"
    assert weights.num_unstepped_samples == 4
    late.users = 0
    weights.step_if_due()
    assert events.taken == [(0, 4), (1, 4), (2, 4)]


def test_staleness_counts_the_versions_between_a_forward_and_its_step() -> None:
    weights = _weights("diloco")
    first = weights.version.number
    for number in range(4):
        # The second batch was computed before the first one's step.
        weights.buckets.open().versions[first] += 1
        _accumulate(weights, number)
    steps = weights.inner_steps
    assert (steps.count, steps.samples, steps.microbatches) == (2, 8, 4)
    assert (steps.staleness, steps.largest_staleness) == (2, 1)
    weights.commit(weights.close().tensors, total_squared_norm=0.0, num_samples=8, num_members=1, lineage="")
    assert weights.inner_steps.count == 0, "each round is counted by itself"


def test_a_version_never_changes() -> None:
    weights = _weights("diloco")
    version, before = weights.version, _values(weights.version.parameters)
    for number in range(4):
        _accumulate(weights, number)
    assert all(torch.equal(version.parameters[name], before[name]) for name in before)
    assert any(not torch.equal(weights.version.parameters[name], before[name]) for name in before)


def test_the_inner_rate_counts_what_the_other_members_do_meanwhile() -> None:
    weights = _weights("diloco", learning_rate=1.0, warmup_samples=99)
    weights.round.num_members, weights.round.run_samples = 3, 10
    assert weights.learning_rate == pytest.approx(0.11)
    for number in range(2):
        _accumulate(weights, number)
    assert weights.learning_rate == pytest.approx(0.11 + 0.12)


# -- synchronous rounds ------------------------------------------------------------------------------------------------


def test_synchronous_commits_are_adamw_in_one_process() -> None:
    """Clipped by the norm of the whole model, of which this stage is a part; the rate follows the run's samples."""
    options: dict[str, float | str] = {
        "weight_decay": 0.1, "clip_norm": 1.0, "schedule": "cosine", "warmup_samples": 8, "total_samples": 64,
    }  # fmt: skip
    weights = _weights("synchronous", **options)
    config = _config("synchronous", **options).optimizer
    reference = dict(_module().named_parameters())
    adamw = torch.optim.AdamW(
        [
            {"params": [reference["weight"]], "weight_decay": 0.1},
            {"params": [reference["bias"]], "weight_decay": 0.0},
        ],
        betas=(config.beta1, config.beta2), eps=config.epsilon,
    )  # fmt: skip
    for number in range(3):
        _accumulate(weights, 2 * number)
        _accumulate(weights, 2 * number + 1)
        assert weights.round_samples == 4
        contribution = weights.close().tensors
        used = weights.commit(
            contribution, total_squared_norm=9.0, num_samples=16, num_members=4, lineage=f"after {number}"
        )
        for group in adamw.param_groups:
            group["lr"] = optim.learning_rate(config, 16 * number)
        assert used == optim.learning_rate(config, 16 * number)
        for name, parameter in reference.items():
            parameter.grad = (_gradients(2 * number)[name] + _gradients(2 * number + 1)[name]) / 2 / 3.0
        adamw.step()
        _assert_same(weights.masters, reference)
        _assert_same(weights.version.parameters, reference)
        current = weights.round
        assert (current.number, current.run_samples, current.num_members) == (number + 1, 16 * (number + 1), 4)
        assert (current.lineage, current.closed, weights.round_samples) == (f"after {number}", False, 0)


def test_synchronous_weights_never_step_on_their_own() -> None:
    weights = _weights("synchronous")
    version = weights.version
    for number in range(20):
        _accumulate(weights, number)
    assert weights.version is version


def test_a_reopened_round_goes_on_with_what_it_had() -> None:
    weights = _weights("synchronous")
    _accumulate(weights, 0)
    weights.close()
    weights.reopen()
    _accumulate(weights, 1)
    expected = {name: (_gradients(0)[name] + _gradients(1)[name]) / 2 for name in _gradients(0)}
    _assert_same(weights.close().tensors, expected)


# -- DiLoCo rounds -----------------------------------------------------------------------------------------------------


def test_diloco_commits_are_nesterov_on_the_anchor() -> None:
    """DiLoCo: v <- mu v + g; theta <- theta - lr (g + mu v), from the anchor and not from the inner weights."""
    weights = _weights("diloco")
    anchor = _values(weights.version.parameters)
    velocity = {name: torch.zeros_like(value) for name, value in anchor.items()}
    for number in range(3):
        for inner in range(4):
            _accumulate(weights, 10 * number + inner)
        contribution = weights.close().tensors
        assert weights.round_samples == 8
        assert not any(value.requires_grad for value in contribution.values())
        _assert_same(contribution, {name: anchor[name] - weights.masters[name] for name in anchor})
        average = {name: value + 0.01 * _gradients(number)[name] for name, value in contribution.items()}
        weights.commit(average, total_squared_norm=0.0, num_samples=16, num_members=2, lineage="")
        for name in anchor:
            velocity[name] = 0.9 * velocity[name] + average[name]
            anchor[name] = anchor[name] - 0.7 * (average[name] + 0.9 * velocity[name])
        _assert_same(weights.masters, anchor)
        _assert_same(weights.version.parameters, anchor)


def test_without_overlap_a_closed_round_takes_no_inner_step_until_it_commits_or_reopens() -> None:
    weights = _overlapping(0)
    for number in range(2):
        _accumulate(weights, number)
    contribution, version = weights.close().tensors, weights.version
    for number in range(2, 4):
        _accumulate(weights, number)
    assert weights.version is version
    assert weights.num_unstepped_samples == 4
    _assert_same(weights.close().tensors, contribution)
    weights.reopen()
    assert weights.version is not version
    assert weights.round_samples == 8


def _overlapping(overlap_steps: int, num_fragments: int = 1) -> StageWeights:
    config = _config("diloco")
    averaging = AveragingConfig(overlap_steps=overlap_steps, num_fragments=num_fragments)
    model = ModelConfig(num_layers=12)
    return weights_of(dataclasses.replace(config, averaging=averaging, model=model), _module(), lineage="")


def test_what_was_learnt_during_an_exchange_is_carried_over_to_the_new_anchor() -> None:
    weights = _overlapping(1)
    anchor = _values(weights.masters)
    for number in range(2):
        _accumulate(weights, number)
    closing = weights.close()
    at_closing = _values(weights.masters)
    for number in range(2, 6):
        _accumulate(weights, number)
    assert weights.num_unstepped_samples == 4, "one step at most while the round is exchanged"
    change = {name: weights.masters[name].detach() - at_closing[name] for name in anchor}
    assert any(bool(value.any()) for value in change.values())
    # A closing again gives what was learnt meanwhile as well; its own result is what is committed here.
    average = {name: 0.5 * value for name, value in closing.tensors.items()}
    weights.commit(average, total_squared_norm=0.0, num_samples=8, num_members=2, lineage="")
    weights.step_if_due()
    moved = {name: anchor[name] - 0.7 * 1.9 * average[name] for name in anchor}
    new_anchor = weights.anchor(1)
    assert new_anchor is not None
    _assert_same(new_anchor, moved)
    # The backlog was stepped at once, on top of what was carried over.
    assert weights.round_samples == 8
    assert weights.num_unstepped_samples == 0


def test_the_carried_change_is_the_next_contribution() -> None:
    weights = _overlapping(1)
    for number in range(2):
        _accumulate(weights, number)
    closing = weights.close()
    at_closing = _values(weights.masters)
    for number in range(2, 4):
        _accumulate(weights, number)
    change = {name: weights.masters[name].detach() - at_closing[name] for name in at_closing}
    weights.commit(closing.tensors, total_squared_norm=0.0, num_samples=8, num_members=1, lineage="")
    later = weights.close()
    assert (later.num_samples, later.round_samples) == (4, 4)
    _assert_same(later.tensors, {name: -value for name, value in change.items()})


def test_an_aborted_exchange_keeps_the_steps_taken_meanwhile() -> None:
    weights = _overlapping(1)
    anchor = _values(weights.masters)
    for number in range(2):
        _accumulate(weights, number)
    weights.close()
    for number in range(2, 4):
        _accumulate(weights, number)
    weights.reopen()
    closing = weights.close()
    assert closing.num_samples == 8
    _assert_same(closing.tensors, {name: anchor[name] - weights.masters[name] for name in anchor})


def test_fragments_are_averaged_in_turn_and_weighed_by_what_is_new_to_them() -> None:
    weights = _overlapping(0, num_fragments=2)
    start = _values(weights.masters)
    samples = []
    for round_number in range(4):
        for number in range(2 * round_number, 2 * round_number + 2):
            _accumulate(weights, number)
        before = _values(weights.masters)
        closing = weights.close()
        name, other = ("weight", "bias") if round_number % 2 == 0 else ("bias", "weight")
        assert list(closing.tensors) == [name]
        assert closing.round_samples == 4
        samples.append(closing.num_samples)
        zero = {name: torch.zeros_like(closing.tensors[name])}
        weights.commit(zero, total_squared_norm=0.0, num_samples=4, num_members=1, lineage="")
        # Back to its anchor, which an average of zero does not move; the other one goes on undisturbed.
        torch.testing.assert_close(weights.masters[name].detach(), start[name])
        assert torch.equal(weights.masters[other].detach(), before[other])
    assert samples == [4, 8, 8, 8]


def test_fragments_deal_out_whole_blocks() -> None:
    names = ["embedding.weight", "layers.0.a", "layers.0.b", "layers.1.a", "layers.10.a", "head.norm", "head.weight"]
    assert dealt(names, 2) == [
        ["embedding.weight", "layers.1.a", "head.norm", "head.weight"], ["layers.0.a", "layers.0.b", "layers.10.a"]
    ]  # fmt: skip
    with pytest.raises(ValueError, match="only 5 blocks"):
        dealt(names, 6)


def test_what_came_while_a_round_was_closed_counts_towards_the_next() -> None:
    weights = _weights("diloco")
    for number in range(2):
        _accumulate(weights, number)
    average = weights.close().tensors
    for number in range(2, 4):
        _accumulate(weights, number)
    weights.commit(average, total_squared_norm=0.0, num_samples=16, num_members=1, lineage="")
    weights.step_if_due()
    assert (weights.round.number, weights.round_samples, weights.num_unstepped_samples) == (1, 4, 0)


def test_the_average_that_is_applied_stays_as_it_is() -> None:
    for setting in ("synchronous", "diloco"):
        weights = _weights(setting, clip_norm=0.1)
        average = _gradients(5)
        for _ in range(2):
            weights.commit(average, total_squared_norm=100.0, num_samples=16, num_members=1, lineage="")
        assert all(torch.equal(average[name], value) for name, value in _gradients(5).items())


# -- anchors and transfer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
def test_nothing_is_left_of_the_versions_of_past_rounds(setting: str) -> None:
    weights = _weights(setting)
    past = []
    for number in range(4):
        past.append(weakref.ref(weights.version))
        _accumulate(weights, number)
        weights.commit(
            weights.close().tensors, total_squared_norm=1.0, num_samples=2, num_members=1, lineage=str(number)
        )
    gc.collect()
    assert [version() for version in past[:-1]] == [None] * 3


def test_the_anchors_of_this_round_and_the_one_before_are_kept() -> None:
    weights = _weights("diloco")
    anchors = []
    for number in range(3):
        anchors.append(_values(weights.version.parameters))
        for inner in range(2):
            _accumulate(weights, 10 * number + inner)
        weights.commit(weights.close().tensors, total_squared_norm=0.0, num_samples=16, num_members=1, lineage="")
    assert weights.anchor(0) is None
    assert weights.anchor(1) is None
    assert weights.anchor(4) is None
    kept = weights.anchor(2)
    assert kept is not None
    _assert_same(kept, anchors[2])
    anchor = weights.anchor(3)
    assert anchor is not None
    # No second copy of the weights.
    assert all(anchor[name] is value for name, value in weights.version.parameters.items())


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_diloco_keeps_anchors_and_momentum_on_the_cpu_wherever_it_trains(device: str) -> None:
    """The outer step is taken there as well: from equal averages follows the same state, bit by bit."""
    elsewhere, here = weights_of(_config("diloco"), _module().to(device), lineage=""), _weights("diloco")
    for number in range(3):
        for weights in (elsewhere, here):
            for inner in range(2):
                weights.buckets.open().add(
                    [g.to(weights.masters["bias"].device) for g in _gradients(inner).values()], 2
                )
                weights.step_if_due()
            assert all(value.device.type == "cpu" for value in weights.close().tensors.values())
            weights.commit(_gradients(10 + number), total_squared_norm=0.0, num_samples=4, num_members=1, lineage="")
        assert elsewhere.state_digest() == here.state_digest()
    newcomer = weights_of(_config("diloco"), _module(seed=1).to(device), lineage="")
    newcomer.install(here.state_tensors(), Round(number=3))
    assert newcomer.state_digest() == here.state_digest()
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
        _assert_same(dict(weights.masters), {name: value.to(device) for name, value in anchor.items()})


@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
def test_a_newcomer_goes_on_exactly_where_the_holder_is(setting: str) -> None:
    holder = _weights(setting)
    for number in range(2):
        _accumulate(holder, number)
    holder.commit(holder.close().tensors, total_squared_norm=1.0, num_samples=16, num_members=1, lineage="a")
    _accumulate(holder, 7)
    state, digest = holder.state_tensors(), holder.state_digest()

    newcomer = weights_of(_config(setting), _module(seed=1), lineage="")
    _accumulate(newcomer, 3)
    newcomer.check(state, digest, round_number=1)
    newcomer.install(state, Round(number=1, run_samples=16, lineage="a"))
    assert newcomer.state_digest() == digest
    assert (newcomer.round.number, newcomer.num_unstepped_samples) == (1, 0)
    assert newcomer.anchor(0) is None
    for weights in (holder, newcomer):
        weights.commit(_gradients(8), total_squared_norm=1.0, num_samples=16, num_members=2, lineage="b")
    assert newcomer.state_digest() == holder.state_digest()


def test_one_copy_of_an_anchor_is_kept_where_evaluation_computes() -> None:
    weights = _weights("diloco")
    _commit_without_steps(weights)
    before, anchor = weights.anchor(0), weights.anchor(1)
    assert before is not None
    assert anchor is not None
    # On a CPU nothing is copied.
    assert weights.on_device(anchor) is anchor
    weights.masters = {name: nn.Parameter(value.to("meta")) for name, value in weights.masters.items()}
    copy = weights.on_device(anchor)
    assert {value.device.type for value in copy.values()} == {"meta"}
    assert weights.on_device(anchor) is copy, "one upload for all microbatches"
    kept = [weakref.ref(value) for value in copy.values()]
    del copy
    other = weights.on_device(before)
    assert [value() for value in kept] == [None] * 2, "another anchor takes its place"
    kept = [weakref.ref(value) for value in other.values()]
    del other
    weights.masters = dict(_module().named_parameters())
    _commit_without_steps(weights)
    assert [value() for value in kept] == [None] * 2, "it is not kept into the next round"


def _away(num_fragments: int = 1) -> tuple[StageWeights, dict[str, torch.Tensor]]:
    """A peer that takes two inner steps of 4 samples each in round 1, and what it learns by them."""
    weights = _overlapping(0, num_fragments)
    _commit_without_steps(weights)
    anchor = _values(weights.masters)
    for number in range(4):
        _accumulate(weights, number)
    learnt = {name: value - anchor[name] for name, value in _values(weights.masters).items()}
    assert all(bool(value.any()) for value in learnt.values())
    return weights, learnt


def _commit_without_steps(weights: StageWeights, *, contributed: bool = True) -> None:
    average = {name: _gradients(20 + weights.round.number)[name] for name in weights.close().tensors}
    weights.commit(average, total_squared_norm=0.0, num_samples=16, num_members=2, lineage="a", contributed=contributed)


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_who_was_left_out_of_a_round_keeps_what_it_has_learnt(num_fragments: int) -> None:
    weights, learnt = _away(num_fragments)
    others = _overlapping(0, num_fragments)
    for _ in range(2):
        _commit_without_steps(others)
    _commit_without_steps(weights, contributed=False)
    assert weights.state_digest() == others.state_digest()
    _assert_same(dict(weights.masters), {name: value + learnt[name] for name, value in _values(others.masters).items()})
    assert weights.round.stepped_samples == 8
    closing = weights.close()
    assert (closing.num_samples, closing.round_samples) == (8, 8)
    for name, value in closing.tensors.items():
        torch.testing.assert_close(value, -learnt[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_who_was_away_keeps_what_it_has_learnt_on_top_of_the_state_that_it_takes_over(num_fragments: int) -> None:
    weights, learnt = _away(num_fragments)
    _accumulate(weights, 9)
    others = _overlapping(0, num_fragments)
    for _ in range(4):
        _commit_without_steps(others)
    weights.install(others.state_tensors(), Round(number=4), carry=True)
    assert weights.state_digest() == others.state_digest()
    _assert_same(dict(weights.masters), {name: value + learnt[name] for name, value in _values(others.masters).items()})
    _assert_same(weights.version.parameters, dict(weights.masters))
    assert (weights.round.stepped_samples, weights.num_unstepped_samples) == (8, 0)
    for _ in range(num_fragments):
        closing = weights.close()
        assert closing.num_samples == 8
        for name, value in closing.tensors.items():
            torch.testing.assert_close(value, -learnt[name], rtol=0, atol=1e-6)
        _commit_without_steps(weights)
    assert weights.close().num_samples == 0, "it counts once"


@pytest.mark.parametrize("moment", ["commit", "install"])
def test_who_has_not_stepped_yet_in_this_round_keeps_what_no_round_of_its_fragment_has_averaged(moment: str) -> None:
    weights, learnt = _away(num_fragments=2)
    others = _overlapping(0, num_fragments=2)
    for _ in range(3):
        _commit_without_steps(others)
    # Round 1 averages the bias with what this peer has learnt; the weight's turn is round 2.
    _commit_without_steps(weights)
    assert weights.round.stepped_samples == 0
    if moment == "commit":
        _commit_without_steps(weights, contributed=False)
    else:
        weights.install(others.state_tensors(), Round(number=3), carry=True)
    assert weights.state_digest() == others.state_digest()
    expected = _values(others.masters)
    expected["weight"] += learnt["weight"]
    _assert_same(dict(weights.masters), expected)
    _assert_same(weights.version.parameters, expected)
    assert weights.round.stepped_samples == 0, "they have counted towards round 1"
    assert weights.close().num_samples == 0
    _commit_without_steps(weights)
    closing = weights.close()
    assert (closing.num_samples, closing.round_samples) == (8, 0)
    for name, value in closing.tensors.items():
        torch.testing.assert_close(value, -learnt[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("moment", ["commit", "install"])
def test_who_went_astray_keeps_nothing(moment: str) -> None:
    weights, _ = _away()
    others = _overlapping(0)
    for _ in range(2):
        _commit_without_steps(others)
    weights.masters["bias"].data[0] = float("nan")
    if moment == "commit":
        _commit_without_steps(weights, contributed=False)
    else:
        weights.install(others.state_tensors(), Round(number=2), carry=True)
    _assert_same(dict(weights.masters), dict(others.masters))
    assert weights.round.stepped_samples == 0
    assert weights.close().num_samples == 0


def test_a_state_is_a_copy() -> None:
    weights = _weights("diloco")
    state, digest = weights.state_tensors(), weights.state_digest()
    for number in range(2):
        _accumulate(weights, number)
    weights.commit(weights.close().tensors, total_squared_norm=0.0, num_samples=16, num_members=1, lineage="")
    assert weights.state_digest() != digest
    weights.check(state, digest, round_number=0)


def test_inner_steps_do_not_change_the_state_that_is_handed_out() -> None:
    weights = _weights("diloco")
    digest = weights.state_digest()
    for number in range(4):
        _accumulate(weights, number)
    assert weights.state_digest() == digest


def _stepped(setting: str) -> StageWeights:
    """After one round."""
    weights = _weights(setting)
    average = {name: torch.ones_like(value) for name, value in weights.close().tensors.items()}
    weights.commit(average, total_squared_norm=1.0, num_samples=16, num_members=1, lineage="")
    return weights


def test_a_state_of_another_digest_is_refused() -> None:
    weights = _weights("diloco")
    state, digest = weights.state_tensors(), weights.state_digest()
    with pytest.raises(IntegrityError, match="digest"):
        weights.check(state | {"anchor/bias": state["anchor/bias"] + 1}, digest, round_number=0)


@pytest.mark.parametrize(
    ("setting", "name", "wrong"),
    [
        ("diloco", "anchor/weight", None),
        ("diloco", "anchor/weight", torch.zeros(5, 5)),
        ("diloco", "anchor/more", torch.zeros(4)),
        ("diloco", "outer/more/momentum_buffer", torch.zeros(4)),
        ("diloco", "outer/bias/momentum_buffer", torch.zeros(3)),
        ("diloco", "outer/bias/exp_avg", torch.zeros(4)),
        ("synchronous", "outer/bias/step", None),
        ("synchronous", "outer/bias/step", torch.zeros(4)),
        ("synchronous", "outer/bias/exp_avg", None),
        ("synchronous", "outer/bias/exp_avg_sq", torch.zeros(2, 2)),
    ],
)
def test_a_state_of_other_tensors_is_refused(setting: str, name: str, wrong: torch.Tensor | None) -> None:
    weights = _stepped(setting)
    state = weights.state_tensors()
    weights.check(state, digest_of(state), round_number=1)
    state = {key: value for key, value in state.items() if key != name} | ({} if wrong is None else {name: wrong})
    with pytest.raises(IntegrityError, match="another model"):
        weights.check(state, digest_of(state), round_number=1)


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("diloco", "anchor/weight", float("nan")),
        ("diloco", "anchor/weight", float("inf")),
        ("diloco", "anchor/bias", -1e30),
        ("diloco", "outer/bias/momentum_buffer", float("-inf")),
        ("synchronous", "anchor/bias", float("nan")),
        ("synchronous", "outer/bias/exp_avg", float("nan")),
        ("synchronous", "outer/bias/exp_avg_sq", -1.0),
        ("synchronous", "outer/bias/exp_avg_sq", float("inf")),
        ("synchronous", "outer/bias/step", float("nan")),
        ("synchronous", "outer/bias/step", -1.0),
        ("synchronous", "outer/bias/step", 2.0),
    ],
)
def test_a_state_that_nobody_can_have_reached_is_refused(setting: str, name: str, value: float) -> None:
    """Its digest fits: it is what its sender says it is."""
    weights = _stepped(setting)
    state = weights.state_tensors()
    state[name].view(-1)[-1] = value
    with pytest.raises(IntegrityError, match=f"{name} of the state"):
        weights.check(state, digest_of(state), round_number=1)


def test_a_state_in_other_numbers_is_refused() -> None:
    weights = _weights("diloco")
    state = {name: value.to(torch.bfloat16) for name, value in weights.state_tensors().items()}
    with pytest.raises(IntegrityError, match="in bfloat16"):
        weights.check(state, digest_of(state), round_number=0)
