"""Microbatches with few targets, or none. Gradients, steps and averages weigh every target equally, as one process
does."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, cast

import pytest
import torch

from scripts.benches.sides.reference import Reference
from swarm.averaging.agreement.shares import divide
from swarm.config import OuterConfig, RoundsConfig, RunConfig
from swarm.data.microbatches import Microbatches
from swarm.errors import MalformedMessage
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.stage.boundary import HIDDEN
from swarm.stage.state import digest_of
from swarm.training import optim, samples
from swarm.training.round_member import Contribution
from swarm.training.samples import DOCUMENTS, TARGETS
from tests.stage.backends import chain_of, run_microbatch
from tests.support.chain import assert_close
from tests.support.commits import end_rounds
from tests.support.partial import PartialData, partial_config, partial_samples

DILOCO = RoundsConfig(setting="diloco", round_samples=16, inner_batch_samples=4)


class Member:
    """A member that accumulates on its own: a chain of stages in one process."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.stages = chain_of(config)

    def train(self, number: int) -> float:
        """Train and acknowledge a microbatch, and return its loss."""
        round_number = self.stages[0].weights.round.number
        loss, entries = run_microbatch(self.stages, number, round_number=round_number)
        for stage, entry in zip(self.stages, entries, strict=True):
            stage.settle(entry)
        return loss

    def close(self) -> list[Contribution]:
        return [stage.weights.contribute() for stage in self.stages]


def _reference(config: RunConfig) -> Reference:
    return Reference(config, cast(Microbatches, PartialData(config)))


def _average(contributions: Sequence[Contribution]) -> dict[str, torch.Tensor]:
    """Average contributions as a group does."""
    begun = {
        str(number): pb.BeginReply(
            num_samples=each.num_samples, num_targets=each.num_targets, round_samples=each.round_samples, norm=1.0
        )
        for number, each in enumerate(contributions)
    }
    shares = divide(begun, num_elements=1, tile=1, clip_to_median=0.0)
    weights_M = torch.tensor([share.weight for share in shares.members])
    stacked = {name: torch.stack([each.tensors[name] for each in contributions]) for name in contributions[0].tensors}
    return {name: torch.tensordot(weights_M, tensors, 1) for name, tensors in stacked.items()}


def _commit(members: Sequence[Member], *, num_samples: int) -> None:
    averages = [_average(of_stage) for of_stage in zip(*(member.close() for member in members), strict=True)]
    for member in members:
        weights = [stage.weights for stage in member.stages]
        end_rounds(weights, averages, num_samples=num_samples, num_members=len(members))


def _weights(member: Member) -> dict[str, torch.Tensor]:
    return {name: value for stage in member.stages for name, value in stage.weights.masters.items()}


@pytest.mark.parametrize(
    ("num_stages", "packing", "optimizer"),
    [
        (1, True, "adamw"),
        (2, False, "adamw"),
        (3, True, "adamw"),
        (3, True, "muon"),
    ],
)
def test_synchronous_rounds_follow_one_process(
    num_stages: int, packing: bool, optimizer: Literal["adamw", "muon"]
) -> None:
    """This holds however targets are distributed: one member has nearly all, another one has none in the first
    round."""
    config = partial_config(num_stages=num_stages, packing=packing)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name=optimizer))
    members, reference = [Member(config), Member(config), Member(config)], _reference(config)
    for number in range(2):
        losses = [members[member].train(4 * number + index) for index, member in enumerate((0, 1, 2, 1))]
        counts = [samples.amount(partial_samples(config, 4 * number + index)).targets for index in range(4)]
        assert max(counts) > 10 * min(counts)
        _commit(members, num_samples=8)
        mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
        assert mean == pytest.approx(reference.step(number), abs=1e-5)
        for member in members:
            assert_close(_weights(member), dict(reference.weights), 1e-5)
        digests = [[digest_of(stage.weights.state()) for stage in member.stages] for member in members]
        assert digests == digests[:1] * 3


def test_diloco_rounds_follow_one_process_for_each_member() -> None:
    """Inner steps are means over the targets of their batch, and the average weighs members by their targets."""
    # There is one stage, because with DiLoCo each stage clips by its own norm.
    config = partial_config(num_stages=1, rounds=DILOCO, outer=OuterConfig(learning_rate=0.5, momentum=0.0))
    members, work = [Member(config), Member(config)], [(0, 1, 2, 3), (1, 2, 5, 6)]
    anchor = {name: value.detach().clone() for name, value in _weights(members[0]).items()}
    learnt, targets = [], []
    for member, numbers in zip(members, work, strict=True):
        for number in numbers:
            member.train(number)
        reference, adamw = _reference(config), optim.AdamW(config.optimizer)
        for step, batch in enumerate((numbers[:2], numbers[2:])):
            reference.accumulate_mean(dict.fromkeys(batch, 1))
            reference.update_with(adamw, 4 * step)
        assert_close(_weights(member), dict(reference.weights), 1e-5)
        learnt.append({name: anchor[name] - value for name, value in reference.weights.items()})
        targets.append(sum(samples.amount(partial_samples(config, number)).targets for number in numbers))
    assert targets[0] > 5 * targets[1]
    _commit(members, num_samples=16)
    shares = [count / sum(targets) for count in targets]
    expected = {
        name: value - 0.5 * sum(share * each[name] for share, each in zip(shares, learnt, strict=True))
        for name, value in anchor.items()
    }
    for member in members:
        assert_close(_weights(member), expected, 1e-5)


def test_a_microbatch_without_targets_counts_once_and_teaches_nothing() -> None:
    member = Member(partial_config())
    assert member.train(2) == 0.0
    for contribution in member.close():
        assert (contribution.num_samples, contribution.num_targets) == (2, 0)
        assert not any(bool(value.any()) for value in contribution.tensors.values())


def test_a_round_without_targets_moves_nothing_by_gradients() -> None:
    """A step is still taken, as in one process."""
    config = partial_config()
    members, reference = [Member(config), Member(config)], _reference(config)
    for member, number in zip((0, 1, 0, 1), (2, 6, 10, 14), strict=True):
        members[member].train(number)
    _commit(members, num_samples=8)
    reference.accumulate_mean(dict.fromkeys((2, 6, 10, 14), 1))
    reference.update(0)
    assert_close(_weights(members[0]), dict(reference.weights), 1e-7)


@pytest.mark.parametrize(("name", "value"), [(TARGETS, 2), (TARGETS, -1), (DOCUMENTS, 3), (DOCUMENTS, -1)])
async def test_what_cannot_be_is_refused_at_every_stage(name: str, value: int) -> None:
    config = partial_config()
    batch = partial_samples(config, 0)
    batch[name] = batch[name].index_fill(1, torch.tensor([0]), value)
    for stage in Member(config).stages:
        with pytest.raises(MalformedMessage):
            await stage.function.checked({**batch, HIDDEN: torch.zeros(2, 16, 32)}, stage.function.boundary)
