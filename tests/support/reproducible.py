"""A program that prints digests of results that every member of a stage computes for itself, and that have to be equal.

Run by tests/test_reproducible.py, as it would be on other processors.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from scripts.benches.shared.common import run_of
from swarm.compression.buffers import TILE
from swarm.compression.dct import inverse_dct
from swarm.config import OptimizerConfig, OuterConfig, RoundsConfig, Setting
from swarm.config.schedule import learning_rate
from swarm.model.layers import seeded_generator
from swarm.model.masks import random_mask
from swarm.model.stages import build_stage
from swarm.stage.buckets import moved
from swarm.stage.stage import weights_of
from swarm.stage.state import digest_of
from swarm.training import optim
from swarm.training.optimizers import Muon
from tests.compression.all_codecs import CODECS
from tests.support.commits import end_round

CPU = torch.device("cpu")
NUM_ELEMENTS = 3 * 4096 + 77
"""The length of an encoded vector. Its last tile and its last block are incomplete, and so is its last group of numbers
that a processor computes with one instruction."""
CONFIG = run_of(
    "reproducible", width=72, layers=2, head_width=36, setting="diloco", length=128, microbatch=2,
    optimizer={
        "learning_rate": 0.03, "clip_norm": 1.0, "weight_decay": 0.1, "schedule": "cosine", "warmup_samples": 20,
        "total_samples": 400,
    },
)  # fmt: skip
ANOTHER_PROCESSOR = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "NPY_DISABLE_CPU_FEATURES": "AVX F16C FMA3 AVX2 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL",
}
"""An environment in which torch, numpy and MKL (which torch uses) compute as if the processor had fewer
instructions."""
MAGNITUDES = torch.tensor([math.ldexp(1.0, -exponent) for exponent in (0, 0, 0, 1, 5, 10, 20, 60, 70, 130, 140)])


def drawn(like: Mapping[str, torch.Tensor], *key: int | str) -> dict[str, torch.Tensor]:
    """Numbers of many magnitudes, some of them subnormal. They are made from uniform draws, which are equal on all
    processors."""
    generator = seeded_generator(torch.device("cpu"), *key)
    return {
        name: (torch.rand(tensor.shape, generator=generator) - 0.5)
        * MAGNITUDES[(torch.rand(tensor.shape, generator=generator) * len(MAGNITUDES)).long()]
        for name, tensor in sorted(like.items())
    }


def of_arithmetic(device: torch.device = CPU) -> dict[str, str]:
    """Digests of weights and moments after some steps on a device, and of tiles."""
    shapes = {"matrix": torch.empty(301, 513), "vector": torch.empty(1003), "number": torch.empty(())}
    hidden = {"layers.0.matrix": torch.empty(301, 77), "layers.1.matrix": torch.empty(40, 203)}
    optimizers = {
        "AdamW": optim.AdamW(OptimizerConfig(weight_decay=0.1)),
        "AdamW with moments in 8 bits": optim.AdamW(OptimizerConfig(weight_decay=0.1, moments="int8")),
        "Muon": Muon(OptimizerConfig(weight_decay=0.1), same_bits=True),
        "Nesterov": optim.OuterSgd(OuterConfig(momentum=0.9)),
    }
    digests = {}
    for name, optimizer in optimizers.items():
        stepped = shapes | hidden if name == "Muon" else shapes
        weights = moved(drawn(stepped, name), device)
        for number in range(4):
            rate = learning_rate(CONFIG.optimizer, 17 * number)
            optim.step(optimizer, weights, moved(drawn(stepped, name, number), device), rate)
        digests[name] = digest_of(moved(weights | optim.state_tensors(optimizer, weights), CPU))
    coefficients = drawn({"tiles": torch.empty(70, TILE)}, "coefficients")
    coefficients["tiles"][::7] = 0.0
    digests["inverse DCT"] = digest_of({"tiles": inverse_dct(coefficients["tiles"])})
    return digests


def of_states() -> dict[str, str]:
    """Digests of a stage's state at the beginning, and after some rounds."""
    digests = {}
    runs: tuple[tuple[Setting, Literal["adamw", "muon"]], ...] = (
        ("synchronous", "adamw"), ("synchronous", "muon"), ("diloco", "adamw")
    )  # fmt: skip
    for setting, optimizer in runs:
        rounds = RoundsConfig(setting=setting, round_samples=16, inner_batch_samples=4)
        config = dataclasses.replace(
            CONFIG, rounds=rounds, optimizer=dataclasses.replace(CONFIG.optimizer, name=optimizer)
        )
        weights = weights_of(config, build_stage(config, 0, device="cpu"), lineage="")
        name = f"{setting}, {optimizer}"
        digests[f"{name}, initial"] = digest_of(weights.state())
        for number in range(3):
            average = drawn(weights.contribute().tensors, setting, number)
            end_round(weights, average, total_squared_norm=7.0, num_members=2, lineage="00")
        digests[f"{name}, 3 rounds"] = digest_of(weights.state())
    return digests


def of_masks() -> dict[str, str]:
    """Digests of dropout's masks."""
    probabilities = (0.1, 0.5)
    return {
        f"masks of {probability}": digest_of({
            str(microbatch): random_mask((3, 777), probability, CPU, 5, microbatch, "layers.1.attention")
            for microbatch in range(8)
        })
        for probability in probabilities
    }  # fmt: skip


def of_codecs(folder: Path) -> dict[str, str]:
    """Digests of the vectors that the codecs decode from their files."""
    return {
        name: digest_of({"vector": codec.decode((folder / name).read_bytes(), NUM_ELEMENTS)})
        for name, codec in CODECS.items()
    }


def write_encoded(folder: Path) -> None:
    """Write a file for each codec. No two members encode the same vector, so each may encode in its own way."""
    vector_N = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(0))
    for name, codec in CODECS.items():
        (folder / name).write_bytes(codec.encode(vector_N))


def of_everything(folder: Path) -> dict[str, str]:
    return of_arithmetic() | of_states() | of_masks() | of_codecs(folder)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    sys.stdout.write(json.dumps(of_everything(Path(sys.argv[1]))))
