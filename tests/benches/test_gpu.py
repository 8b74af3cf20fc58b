"""The gpu bench on the CPU: its plain loop is the run's training, a part that fails stops no other, and what is said
where there is no GPU."""

import dataclasses

import pytest
import torch

from scripts.benches import gpu
from scripts.benches.shared.common import run_of, with_corpus
from scripts.benches.sides import gpu_stage
from scripts.benches.sides.reference import Reference

CPU = torch.device("cpu")
TINY = gpu.Options(
    device="cpu", d_model=64, layers=2, vocab_size=256, sequence_length=16, stage_width=64, microbatches=2, tokens=4
)  # fmt: skip


def test_the_plain_loop_takes_the_steps_of_the_run() -> None:
    config, data = with_corpus(
        run_of(
            "gpu", width=32, layers=2, head_width=16, length=16, microbatch=2, round_samples=4,
            data={"max_tokens": 100_000},
            optimizer={"learning_rate": 1e-2, "warmup_samples": 0, "weight_decay": 0.1, "clip_norm": 0.5},
        )
    )  # fmt: skip
    found = gpu_stage.train(config, data, CPU, warm_up=1, steps=5, compiles=False)
    reference = Reference(config, data)
    assert found.losses == pytest.approx([reference.step(step) for step in range(6)], abs=1e-4)
    assert found.losses[-1] < found.losses[0] - 0.3


def test_both_sides_write_the_same_text() -> None:
    figures = gpu.run(dataclasses.replace(TINY, only=("generate",)))
    assert figures["same_tokens"]
    assert figures["generate_ratio_to_transformers"] > 0.0
    assert gpu.exit_code(figures) == 0
