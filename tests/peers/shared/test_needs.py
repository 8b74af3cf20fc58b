"""What stages need: by the formulas of the docs, and together."""

import dataclasses

import pytest
import torch

from peers.shared.needs import PROGRAM_BYTES, Needs, num_parameters, of_stages, residual_bytes, settled_bytes
from swarm import config as configs
from swarm.compression.feedback import ErrorFeedback, Owed, Residual
from swarm.config import (
    AveragingConfig,
    OptimizerConfig,
    OuterConfig,
    RoundsConfig,
    RunConfig,
    StagesConfig,
)
from swarm.model.loss import loss_bytes
from swarm.model.stage_module import StageModule
from swarm.model.stages import build_transformer


def _config(**changes: object) -> RunConfig:
    return dataclasses.replace(configs.load_preset("tiny"), stages=StagesConfig(num_stages=1), **changes)  # type: ignore[arg-type]


def _num_parameters() -> int:
    return sum(
        parameter.numel() for parameter in build_transformer(_config(), device=torch.device("meta")).parameters()
    )


def test_needs_are_the_formulas_of_the_docs() -> None:
    """Compare the bytes for each parameter: held, for moments, and while a round is averaged."""
    size = _num_parameters()
    for setting, total, on_device in (("synchronous", 24 + 4 + 24, 24 + 4), ("diloco", 32 + 8 + 24, 20 + 8)):
        rounds, adamw = RoundsConfig(setting=setting), OptimizerConfig(name="adamw")  # type: ignore[arg-type]
        config = _config(rounds=rounds, optimizer=adamw, outer=OuterConfig())
        loss = loss_bytes(config.model, config.data.tokens_per_microbatch)
        settled = config.microbatches_per_round * settled_bytes(config, 0)
        assert Needs.of(config, 0, on_gpu=False).device == total * size + loss + PROGRAM_BYTES + settled
        gpu = Needs.of(config, 0, on_gpu=True)
        loss = loss_bytes(config.model, config.data.tokens_per_microbatch, fused=True)
        assert (gpu.device, gpu.ram) == (on_device * size + loss, (total - on_device) * size + PROGRAM_BYTES + settled)
        assert gpu.checkpoint == (12 if setting == "synchronous" else 8) * size


@pytest.mark.parametrize("on_gpu", [False, True])
def test_stages_of_one_peer_take_turns_with_gradients_and_share_the_program(on_gpu: bool) -> None:
    config = configs.load_preset("tiny")
    first, middle, last = of_stages(config, on_gpu=on_gpu).values()
    gradients = [4 * num_parameters(config, stage) for stage in range(3)]
    loss = loss_bytes(config.model, config.data.tokens_per_microbatch, fused=on_gpu)
    both = first + middle + last
    shared = sum(gradients) + loss - max(*gradients[:2], gradients[2] + loss)
    programs = 2 * PROGRAM_BYTES
    assert first.device + middle.device + last.device - both.device == shared + (0 if on_gpu else programs)
    assert first.ram + middle.ram + last.ram - both.ram == (programs if on_gpu else 0)
    assert both.graphs == first.graphs + middle.graphs + last.graphs


def test_what_codecs_drop_is_kept_from_round_to_round() -> None:
    """The new residual is there beside the old one until the round commits."""
    exact, sparse = (_config(averaging=AveragingConfig(codec=codec)) for codec in ("fp32", "topk"))
    size = _num_parameters()
    feedback = ErrorFeedback(1.0)
    half = Owed(slice(0, size // 2), torch.zeros(size // 2))
    feedback.commit(Residual(contribution_D=torch.zeros(size), owed=[half]))
    assert residual_bytes(exact, 0) == 0
    assert residual_bytes(sparse, 0) == pytest.approx(2 * feedback.num_bytes, abs=8)
    assert Needs.of(sparse, 0, on_gpu=True).ram > residual_bytes(sparse, 0)


def test_stages_with_fewer_microbatches_than_others_of_their_shape_need_less() -> None:
    stages = StagesConfig(num_stages=4, variants=(1, 2, 1, 1), paths=((0, 0, 0, 0), (0, 1, 0, 0)))
    model = dataclasses.replace(configs.load_preset("tiny").model, num_layers=4)
    rounds = RoundsConfig(setting="synchronous", round_samples=64)
    config = dataclasses.replace(configs.load_preset("tiny"), model=model, stages=stages, rounds=rounds)
    found = of_stages(config, on_gpu=True)
    assert found == {stage: Needs.of(config, stage, on_gpu=True) for stage in range(4)}
    assert found[1].ram < found[2].ram


class _Twice(StageModule):
    def __init__(self, config: RunConfig, stage: int, layer_range: range) -> None:
        super().__init__(config, stage, layer_range)
        self.more = StageModule(config, stage, layer_range)


def test_a_stage_takes_what_the_largest_of_its_variants_takes() -> None:
    twice = f"{_Twice.__module__}:{_Twice.__qualname__}"
    stages = StagesConfig(num_stages=3, variants=(2, 1, 2), paths=((0, 0, 0), (1, 0, 1)))
    config = dataclasses.replace(configs.load_preset("tiny"), stages=stages)
    built_in = of_stages(config, on_gpu=True)
    classes = ((twice, "", ""), ("no.such:Class", "", ""))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, custom_class=classes))
    mine = of_stages(config, on_gpu=True, blocks=config.blocks_of(0)[:2])
    assert mine[0].weights == 2 * built_in[0].weights
    assert mine == {0: mine[0], 1: built_in[1]}, "nothing of the other path is imported"
    classes = ((twice, "", ""), ("", "", ""))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, custom_class=classes))
    assert of_stages(config, on_gpu=True) == {**built_in, 0: mine[0].or_more(built_in[0])}
