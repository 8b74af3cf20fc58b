"""The memory bench: that its arithmetic is that of the code."""

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from peers.shared import needs as sizes
from scripts.benches.memory import SETTINGS
from scripts.benches.shared import common
from scripts.benches.shared.common import run_of
from scripts.benches.sides import memory_stage
from swarm.config import RunConfig
from swarm.model.nf4 import Nf4Matrix
from swarm.stage.backend import StageBackend
from swarm.stage.boundary import GRADIENT, reply_specs
from tests.support.commits import end_round


def _config(
    setting: str = "synchronous", lora_rank: int = 0, optimizer: str = "adamw", moments: str = "fp32",
    versions: str = "fp32", base: str = "as-is",
) -> RunConfig:  # fmt: skip
    return run_of(
        "memory", width=64, layers=6, head_width=16, stages=3, setting=setting, length=32, microbatch=2,
        round_samples=4, rounds={"inner_batch_samples": 2}, lora={"rank": lora_rank, "base": base},
        optimizer={"name": optimizer, "moments": moments}, model={"versions": versions},
    )  # fmt: skip


def _train(backend: StageBackend, config: RunConfig) -> None:
    forward = backend.forward(0, backend.weights.round.number, memory_stage.random_inputs(config))
    _, accumulated = backend.backward(forward, torch.randn(reply_specs(config, 1)[GRADIENT].shape), accumulate=True)
    assert accumulated is not None
    backend.settle(accumulated)


def _tensor_bytes() -> int:
    """The bytes of all living tensors."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    # What was compiled before in this process has left tensors without memory.
    tensors = [tensor for tensor in found if not isinstance(tensor, FakeTensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"num_kv_heads": 2},
        {"head_width": 32, "qk_norm": True, "num_kv_heads": 2},
        {"autocast": "bf16"},
        {"positions": "learned", "max_positions": 32, "feed_forward": "gelu", "norm": "layer", "qkv_bias": True},
    ],
)
def test_parameters_and_graphs_are_as_computed(model: dict[str, Any], lora_rank: int) -> None:
    config = _config(lora_rank=lora_rank)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
    backend = common.cpu_backend(config, 1, graph_bytes=1 << 30)
    assert sizes.num_parameters(config, 1) == backend.weights.num_elements
    backend.release(backend.forward(0, 0, memory_stage.random_inputs(config)))
    # With autocast an adapter keeps a little more than is computed.
    exactly = 0.06 if lora_rank and config.model.autocast != "off" else 0.0
    assert sizes.graph_bytes(config, 1) == pytest.approx(backend.budget.graph_bytes, rel=exactly, abs=0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "options",
    [{}, {"lora_rank": 4}, {"lora_rank": 4, "base": "nf4"}, {"moments": "int8", "versions": "bf16"}],
    ids=["default", "lora", "nf4", "small"],
)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_stage_holds_what_is_computed_and_no_copy_more(setting: str, options: dict[str, Any], optimizer: str) -> None:
    """With adapters, a frozen weight takes two bytes, and a frozen norm's weight four."""
    config = _config(setting, optimizer=optimizer, **options)
    Nf4Matrix(torch.ones(1, 1)).dense(torch.float32)  # makes tables that a process has once
    before_bytes = _tensor_bytes()
    backend = common.cpu_backend(config, 1, graph_bytes=1 << 30)
    for _ in range(2):
        _train(backend, config)
        closing = backend.weights.contribute()
        end_round(backend.weights, closing.tensors, total_squared_norm=1.0, num_samples=4)
        del closing
    _train(backend, config)
    # The gradients that a synchronous round may have to take out again are counted elsewhere, by microbatch.
    sources = backend.weights.buckets.open().sources
    tensors = [tensor for s in sources for tensor in (*s.wire_inputs.values(), s.wire_gradient) if tensor is not None]
    assert len(sources) == (setting == "synchronous")
    # So are the signs of a sketch: a sign and a bucket of each row, and a sign of each column of the widest parameter.
    masters = [*backend.weights.masters.values()] if setting == "synchronous" else []
    sketch_bytes = sum(12 * master.shape[0] for master in masters)
    sketch_bytes += max((4 * master[0].numel() for master in masters), default=0)
    # Adam's step counters are a few bytes besides.
    held_bytes = _tensor_bytes() - before_bytes - sum(tensor.nbytes for tensor in tensors) - sketch_bytes
    assert 0 <= held_bytes - sum(sizes.state_bytes(config, 1).values()) < 1000
