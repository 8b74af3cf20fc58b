"""How long peers stay."""

import dataclasses

import pytest

from swarm.config import ModelConfig, RunConfig, StagesConfig
from swarm.model.stages import build_stage
from swarm.rebalancing.judgement import PRIOR_SECONDS, Stays, costs_of
from swarm.types import PeerId


def _peers(*numbers: int) -> frozenset[PeerId]:
    return frozenset(PeerId(str(number)) for number in numbers)


def test_departures_per_time_watched() -> None:
    stays = Stays()
    assert stays.mean_seconds == PRIOR_SECONDS
    now = 0.0
    for minute in range(1000):
        # One of ten peers is replaced each minute, so each stays for ten minutes.
        stays.look(_peers(*range(minute, minute + 10)), now)
        now += 60
    assert 590 < stays.mean_seconds < 610


def test_nobody_leaves() -> None:
    stays = Stays()
    for look in range(10):
        stays.look(_peers(1, 2), 3600.0 * look)
    assert stays.mean_seconds == 19 * 3600


def _config(**model: object) -> RunConfig:
    return dataclasses.replace(
        RunConfig(),
        model=ModelConfig(**{"num_layers": 6, "d_model": 64, **model}),  # type: ignore[arg-type]
        stages=StagesConfig(num_stages=3),
    )


def _costs(config: RunConfig) -> list[float]:
    costs = costs_of(config)
    assert tuple(costs) == config.blocks
    return list(costs.values())


def test_the_mean_is_one_and_the_head_costs() -> None:
    costs = _costs(_config(vocab_size=50_000))
    assert sum(costs) == pytest.approx(3)
    assert costs[0] == pytest.approx(costs[1], rel=0.01)
    assert costs[2] > 5 * costs[1]


def test_layers_count() -> None:
    config = dataclasses.replace(_config(), stages=StagesConfig(num_stages=3, layers_per_stage=(1, 2, 3)))
    costs = _costs(config)
    assert costs[1] == pytest.approx(2 * costs[0], rel=0.01)
    own = dataclasses.replace(config, model=dataclasses.replace(config.model, custom_class="a.b:C"))
    assert _costs(own) == pytest.approx((0.5, 1, 1.5))
    none = dataclasses.replace(config, stages=StagesConfig(num_stages=3, layers_per_stage=(0, 3, 3)))
    assert 0 < _costs(none)[0] < 0.01


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"bottleneck_dim": 8},
        {"bottleneck_dim": 8, "bottleneck": "learned", "bottleneck_layers": (2, 4)},
        {"head_width": 40},
        {"feed_forward": "gelu", "feed_forward_bias": True},
    ],
)
def test_multiplications_are_those_of_the_matrices(model: dict[str, object]) -> None:
    """There is only one token, so attention has next to no multiplications between tokens."""
    config = _config(num_heads=4, num_kv_heads=2, vocab_size=1000, **model)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence_length=1))
    costs = _costs(config)
    matrices = [
        sum(
            p.numel()
            for name, p in build_stage(config, stage, device="meta").named_parameters()
            if p.ndim == 2 and not name.startswith("embedding")
        )
        for stage in (1, 2)
    ]
    assert costs[2] / costs[1] == pytest.approx(matrices[1] / matrices[0], rel=0.02)
