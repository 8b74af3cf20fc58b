"""What stages need: by the formulas of the docs, and together."""

import dataclasses

import pytest
import torch

from peers.shared.needs import PROGRAM_BYTES, Needs, num_parameters, of_stages, residual_bytes, settled_bytes
from swarm import config as configs
from swarm.compression.feedback import ErrorFeedback, Residual
from swarm.config import (
    AveragingConfig,
    LoraConfig,
    OptimizerConfig,
    OuterConfig,
    RoundsConfig,
    RunConfig,
    StagesConfig,
)
from swarm.model.loss import loss_bytes
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


def test_muon_has_one_moment_of_a_matrix() -> None:
    """Each layer has matrices of 4 d_model^2 (attention) and 3 d_model * feed-forward width numbers."""
    plain, muon = (_config(optimizer=OptimizerConfig(name=name)) for name in ("adamw", "muon"))
    model = plain.model
    matrices = model.num_layers * (4 * model.d_model**2 + 3 * model.d_model * model.feed_forward_width)
    difference = Needs.of(plain, 0, on_gpu=True).device - Needs.of(muon, 0, on_gpu=True).device
    assert difference == 4 * matrices


def test_with_adapters_the_model_takes_two_bytes_a_parameter() -> None:
    whole, adapted = Needs.of(_config(), 0, on_gpu=True), Needs.of(_config(lora=LoraConfig(rank=1)), 0, on_gpu=True)
    assert adapted.device < whole.device / 3
    assert adapted.device > 2 * _num_parameters()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_stages_of_one_peer_take_turns_with_gradients_and_share_the_program(on_gpu: bool) -> None:
    config = configs.load_preset("tiny")
    first, middle, last = of_stages(config, on_gpu=on_gpu)
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
    feedback.commit(Residual(contribution_D=torch.zeros(size), part=slice(0, size // 2), sum_P=torch.zeros(size // 2)))
    assert residual_bytes(exact, 0) == 0
    assert residual_bytes(sparse, 0) == pytest.approx(2 * feedback.num_bytes, abs=8)
    assert Needs.of(sparse, 0, on_gpu=True).ram > residual_bytes(sparse, 0)


def test_in_groups_a_peer_keeps_its_groups_average_as_well_and_the_last_result() -> None:
    without, within = (_config(averaging=AveragingConfig(group_size=size)) for size in (0, 8))
    more = Needs.of(within, 0, on_gpu=True).ram - Needs.of(without, 0, on_gpu=True).ram
    assert more == 2 * 4 * _num_parameters()


def test_more_peers_of_a_stage_keep_fewer_microbatches_each() -> None:
    config = dataclasses.replace(configs.load_preset("tiny"), rounds=RoundsConfig(setting="synchronous"))
    alone, among_many = (of_stages(config, on_gpu=True, num_peers=number)[0] for number in (1, 1000))
    assert among_many.ram < alone.ram
    assert among_many.in_flight == 1 < alone.in_flight
    assert among_many.least < alone.least
