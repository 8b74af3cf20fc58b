"""Applying a missed round gives a stage the same bits as at the round's members, and does not change the result."""

import pytest
import torch
from torch import nn

from swarm.config import AveragingConfig, DataConfig, OptimizerConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.stage.stage import weights_of
from swarm.stage.weights import Round, StageWeights
from swarm.training.samples import Amount
from tests.support.commits import end_round


def stage_weights(setting: str, num_fragments: int, seed: int) -> StageWeights:
    synchronous = setting == "synchronous"
    config = RunConfig(
        data=DataConfig(microbatch_size=2),
        rounds=RoundsConfig(
            setting="synchronous" if synchronous else "diloco", round_samples=16, inner_batch_samples=4
        ),
        optimizer=OptimizerConfig(learning_rate=0.05, clip_norm=1.0),
        averaging=AveragingConfig(num_fragments=num_fragments),
        stages=StagesConfig(num_stages=1),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return weights_of(config, nn.Linear(3, 4), lineage="")


@pytest.mark.parametrize(("setting", "num_fragments"), [("synchronous", 1), ("diloco", 1), ("diloco", 2)])
def test_a_snapshot_and_the_results_since_give_the_members_bits(setting: str, num_fragments: int) -> None:
    generator = torch.Generator().manual_seed(7)
    member, joiner = (stage_weights(setting, num_fragments, seed) for seed in (0, 1))

    def commit(weights: StageWeights, average: dict[str, torch.Tensor]) -> None:
        squared_norm = sum(float((t**2).sum()) for t in average.values())
        assert weights.contribute().tensors.keys() == average.keys()
        end_round(weights, average, total_squared_norm=squared_norm, num_members=2, lineage="00")

    snapshot = {}
    results = []
    for number in range(7):
        if number == 3:
            snapshot = member.state_tensors()
        average = {name: torch.randn(t.shape, generator=generator) for name, t in member.contribute().tensors.items()}
        originals = {name: t.clone() for name, t in average.items()}
        commit(member, average)
        assert all(torch.equal(average[name], originals[name]) for name in average)
        results.append(average)
    joiner.install(snapshot, Round(number=3, run_samples=48, lineage="00"))
    # The joiner trains while it is behind. What it learns then is dropped.
    joiner.buckets.open().add([torch.ones_like(p) for p in joiner.masters.values()], Amount(8, 8))
    joiner.step_if_due()
    for average in results[3:]:
        commit(joiner, average)
    assert joiner.state_digest() == member.state_digest()
    assert joiner.round.run_samples == member.round.run_samples
