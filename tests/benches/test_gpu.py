"""The gpu bench on the CPU: its plain loop is the run's training, a part that fails stops no other, and what is said
where there is no GPU."""

import dataclasses
from typing import Any

import pytest
import torch

from scripts.benches import gpu
from scripts.benches.shared.common import with_corpus
from scripts.benches.sides import plain_llama
from scripts.benches.sides.gpu_stage import StageSide
from scripts.benches.sides.reference import Reference
from swarm.config import DataConfig, ModelConfig, OptimizerConfig, RoundsConfig, RunConfig, StagesConfig, WireConfig
from swarm.errors import Fatal

CPU = torch.device("cpu")
TINY = gpu.Options(
    device="cpu", d_model=64, layers=2, vocab_size=256, sequence_length=16, stage_width=64, microbatches=2, tokens=4
)  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(Fatal, match="needs a GPU"):
        gpu.run(gpu.Options())


def test_the_plain_loop_takes_the_steps_of_the_run() -> None:
    config, data = with_corpus(
        RunConfig(
            model=ModelConfig(num_layers=2, d_model=32, num_heads=2),
            stages=StagesConfig(num_stages=1),
            data=DataConfig(sequence_length=16, microbatch_size=2, max_tokens=100_000),
            rounds=RoundsConfig(setting="synchronous", round_samples=4),
            optimizer=OptimizerConfig(learning_rate=1e-2, warmup_samples=0, weight_decay=0.1, clip_norm=0.5),
        )
    )
    found = plain_llama.train(config, data, CPU, warm_up=1, steps=5, compiles=False)
    reference = Reference(config, data)
    assert found.losses == pytest.approx([reference.step(step) for step in range(6)], abs=1e-4)
    assert found.losses[-1] < found.losses[0] - 0.3
    assert found.tokens_per_second > 0.0


def test_a_stage_computes_all_its_microbatches() -> None:
    config = RunConfig(
        model=ModelConfig(num_layers=3, d_model=64, num_heads=1),
        data=DataConfig(sequence_length=16, microbatch_size=2),
        rounds=RoundsConfig(setting="synchronous"),
        wire=WireConfig(dtype="int8"),
    )
    side = StageSide(config, CPU, compiles=False)
    assert side.tokens_per_second(2) > 0.0
    bucket = side.backend.weights.buckets.open()
    assert (bucket.num_samples, bucket.num_tentative, side.backend.budget.num_kept) == (4, 0, 0)


def test_a_part_that_fails_is_named_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no room\nat all")

    monkeypatch.setattr(plain_llama, "train", fails)
    figures = gpu.run(dataclasses.replace(TINY, only=("plain", "stage")))
    assert figures["failed"].keys() == {"plain"}
    assert figures["stage_ratio_to_graph"] > 0.0
    assert gpu.exit_code(figures) == 1
    assert "plain failed: no room" in capsys.readouterr().err


def test_both_sides_write_the_same_text() -> None:
    figures = gpu.run(dataclasses.replace(TINY, only=("generate",)))
    assert figures["same_tokens"]
    assert figures["generate_ratio_to_transformers"] > 0.0
    assert gpu.exit_code(figures) == 0
