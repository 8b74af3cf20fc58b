"""The run's document: told apart by its digest, compared by field."""

import dataclasses

import pytest

from swarm import config
from swarm.config import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    OuterConfig,
    RoundsConfig,
    RunConfig,
)  # fmt: skip
from swarm.config.checks import ADDED
from swarm.errors import ConfigMismatch
from swarm.rpc.bounds import LONGEST_LIST


def test_the_largest_synchronous_round_can_be_reported() -> None:
    text = "[rounds]\nround_samples = 2097152\nsetting = "
    run = config.from_toml(text + "'synchronous'", source="x")
    assert run.microbatches_per_round == LONGEST_LIST, "what a list may have"
    config.from_toml(text.replace("52", "60") + "'diloco'", source="x")


def test_json_is_canonical() -> None:
    run = config.load_preset("tiny")
    again = config.from_json(config.to_json(run), source="DHT")
    assert again == run
    assert again.digest == run.digest


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NextModel(ModelConfig):
    telepathy: bool = dataclasses.field(default=False, metadata=ADDED)


def test_what_the_release_before_does_not_have_is_part_of_the_digest_only_if_it_is_used() -> None:
    model = ModelConfig(num_layers=3)
    unused, used = (RunConfig(model=_NextModel(**vars(model), telepathy=telepathy)) for telepathy in (False, True))
    assert unused.digest == RunConfig(model=model).digest != used.digest
    assert '"telepathy":true' in config.to_json(used)
    assert "telepathy" not in config.to_json(unused)


def test_a_run_that_does_not_use_an_added_setting_is_the_run_that_the_release_before_knows() -> None:
    run = RunConfig()
    grouped = config.with_settings(run, ["averaging.group_size=8"])
    assert "group_size" not in config.to_json(run)
    assert config.from_json(config.to_json(grouped), source="DHT") == grouped != run
    assert config.with_settings(grouped, ["averaging.group_size=0"]).run_id == run.run_id != grouped.run_id
    with pytest.raises(ValueError, match=r"averaging.groupsize'; did you mean averaging.group_size"):
        config.with_settings(run, ["averaging.groupsize=8"])


def test_a_mismatch_names_the_field_and_both_values() -> None:
    with pytest.raises(ConfigMismatch, match=r"data.seed is 0 here and 1 in the run; leave --config and --preset out"):
        config.check_same(RunConfig(), RunConfig(data=DataConfig(seed=1)))


def test_muon_is_the_default_where_it_pays() -> None:
    """This is DiLoCo with inner steps of at least 8 tokens for each column, and a model whose weights are drawn."""
    model, data = ModelConfig(d_model=64), DataConfig(sequence_length=32, microbatch_size=8)
    enough = RunConfig(model=model, data=data, rounds=RoundsConfig(inner_batch_samples=16))
    assert enough.gradient_step.name == "muon"
    others = (
        dataclasses.replace(enough, rounds=RoundsConfig(inner_batch_samples=8)),
        dataclasses.replace(enough, rounds=RoundsConfig(setting="synchronous", inner_batch_samples=16)),
        dataclasses.replace(enough, model=dataclasses.replace(model, weights="0" * 64)),
        dataclasses.replace(enough, lora=LoraConfig(rank=4)),
        dataclasses.replace(enough, optimizer=OptimizerConfig(name="adamw")),
    )
    assert {other.gradient_step.name for other in others} == {"adamw"}
    named = dataclasses.replace(
        enough, rounds=RoundsConfig(setting="synchronous"), optimizer=OptimizerConfig(name="muon")
    )
    assert named.gradient_step.name == "muon"


_IMPORTED = dataclasses.replace(RunConfig(), model=ModelConfig(weights="0" * 64))


@pytest.mark.parametrize(
    ("config", "steps", "expected"),
    [
        (RunConfig(), 10, (1e-3, "cosine", 0, 2560)),
        (_IMPORTED, None, (2e-5, "constant", 256, 0)),
        (_IMPORTED, 100, (2e-5, "cosine", 1280, 25_600)),
        (dataclasses.replace(_IMPORTED, lora=LoraConfig(rank=4)), None, (2e-4, "constant", 256, 0)),
        (
            dataclasses.replace(
                _IMPORTED, optimizer=OptimizerConfig(learning_rate=5e-6, schedule="constant", warmup_samples=0)
            ),
            100,
            (5e-6, "constant", 0, 0),
        ),
        (
            dataclasses.replace(_IMPORTED, optimizer=OptimizerConfig(schedule="linear", total_samples=512)),
            100,
            (2e-5, "linear", 25, 512),
        ),
    ],
)
def test_what_is_left_out_of_the_learning_rate_suits_what_is_trained(
    config: RunConfig, steps: int | None, expected: tuple[float, str, int, int]
) -> None:
    found = config.begun(steps).optimizer
    assert (found.learning_rate, found.schedule, found.warmup_samples, found.total_samples) == expected
    assert found.name == config.optimizer.name
    assert config.begun(steps).begun(7).optimizer == found


@pytest.mark.parametrize(
    ("inner_batches", "outer", "expected"),
    [
        (16, OuterConfig(), (0.7, 0.5)),
        (200, OuterConfig(), (0.7, 0.9)),
        (16, OuterConfig(learning_rate=0.5), (0.5, 0.9)),
        (16, OuterConfig(momentum=0.3), (0.7, 0.3)),
        (500, OuterConfig(learning_rate=1.0, momentum=0.0), (1.0, 0.0)),
    ],
)
def test_an_outer_step_that_is_left_out_follows_from_the_round(
    inner_batches: int, outer: OuterConfig, expected: tuple[float, float]
) -> None:
    """If only one of the two is given, the other one takes DiLoCo's value."""
    run = RunConfig(rounds=RoundsConfig(round_samples=16 * inner_batches, inner_batch_samples=16), outer=outer)
    assert (run.outer_step.learning_rate, run.outer_step.momentum) == expected


def test_a_base_in_4_bits_is_refused_without_adapters() -> None:
    config = RunConfig(lora=LoraConfig(base="nf4"))
    with pytest.raises(ValueError, match=r"lora.base = 'nf4' is for adapters: give lora.rank as well"):
        config.begun()
    assert dataclasses.replace(config, lora=LoraConfig(base="nf4", rank=2)).begun().lora.base == "nf4"
