"""Trains one small model with each of the options that save memory, and measures held-out losses.

A single peer of a single stage takes inner steps and the outer steps of DiLoCo on its own contributions, in this
process: all of it is the code of a peer but for the network. Adapters are trained beside the weights that the default
has reached, frozen as they are or in 4 bits.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch

from scripts.benches.shared.common import cpu_backend, run_of, say, with_corpus
from scripts.benches.sides.reference import NUM_BATCHES, NUM_SAMPLES
from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches
from swarm.model.stages import build_stage
from swarm.stage.backend import StageBackend
from swarm.stage.boundary import TOKENS
from swarm.training.round_member import RoundResult

Changes = Mapping[str, Mapping[str, Any]]
DEFAULT, ADAPTERS = "float32", "adapters"
ARMS: Mapping[str, Changes] = {
    DEFAULT: {},
    "moments in 8 bits": {"optimizer": {"moments": "int8"}},
    "versions in bfloat16": {"model": {"versions": "bf16"}},
    "both": {"optimizer": {"moments": "int8"}, "model": {"versions": "bf16"}},
    "Muon": {"optimizer": {"name": "muon"}},
    "both, Muon": {"optimizer": {"name": "muon", "moments": "int8"}, "model": {"versions": "bf16"}},
}
ADAPTER_ARMS: Mapping[str, Changes] = {
    ADAPTERS: {},
    "adapters beside 4 bits": {"lora": {"base": "nf4"}},
}
COMPARED = {"both, Muon": "Muon"}  # The other arms are compared with the first of their kind
SHARE_OF_ADAPTERS = 4  # Adapters are trained on a quarter of the tokens
ROUND_STEPS = 32
MICROBATCH, LENGTH = 16, 64


def run_config(changes: Changes, seed: int, num_tokens: int, dataset: str) -> RunConfig:
    samples = num_tokens // LENGTH // (ROUND_STEPS * MICROBATCH) * ROUND_STEPS * MICROBATCH
    optimizer = {"name": "adamw", "schedule": "cosine", "total_samples": samples, "learning_rate": 3e-3}
    return run_of(
        "diet", width=64, layers=2, head_width=32, setting="diloco", length=LENGTH, microbatch=MICROBATCH,
        round_samples=ROUND_STEPS * MICROBATCH, dataset=dataset, data={"seed": seed, "held_out_fraction": 0.02},
        rounds={"inner_batch_samples": MICROBATCH}, model=changes.get("model", {}), lora=changes.get("lora", {}),
        optimizer={**optimizer, **changes.get("optimizer", {})},
    )  # fmt: skip


def losses(seed: int, num_tokens: int, dataset: str) -> dict[str, float]:
    """The held-out loss of each arm, in nats a byte."""
    found, weights = dict[str, float](), dict[str, torch.Tensor]()
    for name, changes in ARMS.items():
        found[name], state = _train(name, run_config(changes, seed, num_tokens, dataset))
        weights = weights or state
    for name, changes in ADAPTER_ARMS.items():
        lora = {"rank": 8, **changes.get("lora", {})}
        config = run_config({"lora": lora}, seed, num_tokens // SHARE_OF_ADAPTERS, dataset)
        found[name], _ = _train(name, config, weights)
    return found


def rises(found: Mapping[str, float]) -> dict[str, float]:
    """By how much of it an arm's loss is above that of the same arm without the option."""
    plain = {name: ADAPTERS if name in ADAPTER_ARMS else COMPARED.get(name, DEFAULT) for name in found}
    return {name: found[name] / found[other] - 1.0 for name, other in plain.items() if name not in plain.values()}


def _train(
    name: str, config: RunConfig, weights: Mapping[str, torch.Tensor] | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """The held-out loss at the end, and the weights."""
    started_at = time.perf_counter()
    config, data = with_corpus(config)
    module = build_stage(config, 0, device="cpu", weights=weights)
    backend = cpu_backend(config, 0, graph_bytes=1 << 30, module=module)
    num_rounds = config.optimizer.total_samples // config.rounds.round_samples
    indices = iter(range(num_rounds * ROUND_STEPS))
    for number in range(num_rounds):
        for _ in range(ROUND_STEPS):
            index = next(indices)
            inputs = {TOKENS: torch.from_numpy(data.tokens(index))}
            accumulated = backend.forward_loss(index, number, inputs, accumulate=True)[2]
            assert accumulated is not None
            backend.settle(accumulated)
        closing = backend.weights.contribute()
        backend.weights.commit(_result(number, closing.tensors, config.rounds.round_samples))
    loss = _held_out(backend, data)
    say(f"{name}, seed {config.data.seed}: {loss:.4f} after {time.perf_counter() - started_at:.0f} s")
    return loss, {key.removeprefix("anchor/"): value for key, value in backend.weights.state().items()}


def _result(number: int, tensors: Mapping[str, torch.Tensor], num_samples: int) -> RoundResult:
    return RoundResult(
        round=number, tensors=tensors, num_samples=num_samples, squared_norm=0.0, total_squared_norm=0.0,
        members=("0",), lineage="", attempts=1, digest="", contributed=True,
    )  # fmt: skip


def _held_out(backend: StageBackend, data: Microbatches) -> float:
    anchor = backend.weights.anchor(backend.weights.round.number)
    assert anchor is not None
    tokens = torch.cat([batch[TOKENS] for batch in data.held_out(NUM_SAMPLES)]).int()
    found = [
        float(backend.evaluate({TOKENS: part}, backend.boundary_in(0), anchor)) for part in tokens.chunk(NUM_BATCHES)
    ]
    return sum(found) / len(found)
