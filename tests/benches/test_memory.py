"""The memory bench: that its arithmetic is that of the code, that a case runs, and what its figures mean."""

import asyncio
import dataclasses
import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from peers.doctor import needs as sizes
from scripts.benches import memory
from scripts.benches.memory import (
    SETTINGS,
    Options,
    bytes_per_frozen,
    expected_bytes,
    loss_config,
    run_config,
)
from scripts.benches.shared import common
from scripts.benches.shared.common import write_config
from scripts.benches.shared.paired import Ratio
from scripts.benches.sides import memory_stage
from swarm.compression.codec import contribution_codec, result_codec
from swarm.config import (
    AveragingConfig,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RoundsConfig,
    RunConfig,
    StagesConfig,
    WireConfig,
)
from swarm.model.stages import build_stage
from swarm.stage.backend import StageBackend
from swarm.stage.boundary import GRADIENT, reply_specs
from swarm.stage.graphs import GraphBudget
from swarm.stage.settings import weights_of
from swarm.stage.staging import Staging


def _config(
    setting: str = "synchronous", num_kv_heads: int = 0, lora_rank: int = 0,
    optimizer: Literal["adamw", "muon"] = "adamw",
) -> RunConfig:  # fmt: skip
    assert setting in ("synchronous", "diloco")
    return RunConfig(
        model=ModelConfig(num_layers=6, d_model=64, num_heads=4, num_kv_heads=num_kv_heads),
        lora=LoraConfig(rank=lora_rank),
        stages=StagesConfig(num_stages=3),
        data=DataConfig(sequence_length=32, microbatch_size=2),
        rounds=RoundsConfig(
            setting="synchronous" if setting == "synchronous" else "diloco", round_samples=4, inner_batch_samples=2
        ),
        optimizer=OptimizerConfig(name=optimizer),
    )


def _backend(config: RunConfig) -> StageBackend:
    module = build_stage(config, 1, device="cpu")
    return StageBackend(
        config=config, stage=1, module=module, weights=weights_of(config, module, lineage=""), staging=Staging(),
        budget=GraphBudget(limit_bytes=1 << 30),
    )  # fmt: skip


def _train(backend: StageBackend, config: RunConfig) -> None:
    forward = backend.forward(0, backend.weights.round.number, memory_stage.random_inputs(config))
    _, accumulated = backend.backward(forward, torch.randn(reply_specs(config, 1)[GRADIENT].shape), accumulate=True)
    assert accumulated is not None
    backend.settle(accumulated)


def _tensor_bytes() -> int:
    """The bytes of all living tensors."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
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
        {"gradient_checkpointing": True},
        {"positions": "learned", "max_positions": 32, "feed_forward": "gelu", "norm": "layer", "qkv_bias": True},
    ],
)
def test_parameters_and_graphs_are_as_computed(model: dict[str, Any], lora_rank: int) -> None:
    config = _config(lora_rank=lora_rank)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
    backend = _backend(config)
    assert sizes.num_parameters(config, 1) == backend.weights.num_elements
    backend.release(backend.forward(0, 0, memory_stage.random_inputs(config)))
    # With autocast an adapter keeps a little more than is computed.
    exactly = 0.06 if lora_rank and config.model.autocast != "off" else 0.0
    assert sizes.graph_bytes(config, 1) == pytest.approx(backend.budget.graph_bytes, rel=exactly, abs=0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_stage_holds_what_is_computed_and_no_copy_more(
    setting: str, lora_rank: int, optimizer: Literal["adamw", "muon"]
) -> None:
    """With adapters, a frozen weight takes two bytes, and a frozen norm's weight four."""
    config = _config(setting, lora_rank=lora_rank, optimizer=optimizer)
    before_bytes = _tensor_bytes()
    backend = _backend(config)
    for _ in range(2):
        _train(backend, config)
        closing = backend.weights.close()
        backend.weights.commit(closing.tensors, total_squared_norm=1.0, num_samples=4, num_members=1, lineage="")
        del closing
    _train(backend, config)
    # The gradients that a synchronous round may have to take out again are counted elsewhere, by microbatch.
    sources = backend.weights.buckets.open().sources
    tensors = [tensor for s in sources for tensor in (*s.wire_inputs.values(), s.wire_gradient) if tensor is not None]
    assert len(sources) == (setting == "synchronous")
    # Adam's step counters are a few bytes besides.
    held_bytes = _tensor_bytes() - before_bytes - sum(tensor.nbytes for tensor in tensors)
    assert 0 <= held_bytes - sum(sizes.state_bytes(config, 1).values()) < 1000


@pytest.mark.parametrize("setting", SETTINGS)
async def test_a_case_runs(setting: str, tmp_path: Path) -> None:
    """Both members are in this process, so the test can check which figures there are, but not their size."""
    config = run_config(setting, Options(d_model=128, layers=1, in_flight=2))
    write_config(config, tmp_path / "run.toml")
    async with asyncio.timeout(60):
        await asyncio.gather(*(memory_stage.main(tmp_path, number, 0, 2) for number in range(memory_stage.MEMBERS)))
    measured = json.loads((tmp_path / "0.json").read_text())
    assert expected_bytes(config, 2, is_kept=False).keys() <= measured.keys()


def test_the_loss_of_a_last_stage_is_measured_in_a_process_of_its_own() -> None:
    """Each of three copies of this vocabulary's logits would take 1.5 times as much as the layers' activations."""
    config = loss_config(Options(d_model=128, layers=1, vocabulary=4096))
    assert config.data.tokens_per_microbatch == 4096
    figures = memory.loss_figures(config)
    assert figures["activations_bytes"] == sizes.graph_bytes(config, 1)
    assert figures["peak_ratio"] == figures["peak_bytes"] / figures["expected_peak_bytes"]
    assert 0.7 < figures["peak_ratio"] < 1.3
    assert figures["loss_over_activations"] < 1.1


def test_a_last_stage_has_a_norm_and_a_head_more() -> None:
    config = _config()
    module = build_stage(config, 2, device="cpu")
    assert sizes.num_parameters(config, 2) == sum(parameter.numel() for parameter in module.parameters())


def test_a_frozen_parameter_takes_what_is_left() -> None:
    config = _config(lora_rank=4)
    state_bytes = sum(sizes.state_bytes(config, 1).values())
    assert bytes_per_frozen(config, {"returning": {"after_round": state_bytes}}) == pytest.approx(2, abs=0.02)
    more_bytes = state_bytes + sizes.num_own_parameters(config, 1)
    assert bytes_per_frozen(config, {"returning": {"after_round": more_bytes}}) == pytest.approx(3, abs=0.02)


def _fine_tuning(setting: str, lora_rank: int, **sizes_of_model: Any) -> RunConfig:
    """A model like Llama 3 in stages of four layers."""
    model = ModelConfig(vocab_size=128_256, num_kv_heads=8, **sizes_of_model)
    return RunConfig(
        model=model,
        lora=LoraConfig(rank=lora_rank),
        stages=StagesConfig(num_stages=model.num_layers // 4),
        data=DataConfig(sequence_length=2048, microbatch_size=1),
        rounds=RoundsConfig(setting="synchronous" if setting == "synchronous" else "diloco"),
        # The default for imported models.
        optimizer=OptimizerConfig(name="adamw"),
        averaging=AveragingConfig(codec="fp32"),
        wire=WireConfig(dtype="bf16"),
    )


def test_the_page_on_fine_tuning_has_the_figures_of_the_arithmetic() -> None:
    shapes = (
        {"num_layers": 32, "d_model": 4096, "num_heads": 32, "d_ff": 14_336},
        {"num_layers": 80, "d_model": 8192, "num_heads": 64, "d_ff": 28_672},
    )
    rows: dict[str, list[str]] = {}
    for rank in (0, 16):
        cells: dict[str, list[str]] = {}
        for shape in shapes:
            held = {name: _fine_tuning(name, rank, **shape) for name in SETTINGS}
            config = held["synchronous"]
            # Half of the contribution to the other member, and half of the result.
            num_trained = sizes.num_parameters(config, 1)
            averaged = (contribution_codec(config.averaging).num_bytes(num_trained)) / 2
            averaged += result_codec(config.averaging).num_bytes(num_trained) / 2
            synchronous, diloco = (
                f"{sum(sizes.state_bytes(held[name], 1).values()) / 2**30:.1f}" for name in ("synchronous", "diloco")
            )
            sent = f"{2 * sizes.wire_bytes(config, 1)['output'] / 1e6:.1f}"
            besides = sizes.averaging_bytes(config, 1, num_members=2)
            for name, figure in {
                "GiB that a peer holds, synchronous; DiLoCo": f"{synchronous}; {diloco}",
                "GiB besides, while a round is averaged": f"{besides / 2**30:.1f}",
                "GiB of a sample's graph, in float32": f"{sizes.graph_bytes(config, 1) / 2**30:.1f}",
                "MB that a peer sends for a sample; for a round's average": f"{sent}; {averaged / 1e6:.0f}",
            }.items():
                cells.setdefault(name, []).append(figure)
        for name, (small, large) in cells.items():
            rows.setdefault(name, []).append(f"{small} ({large})")
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    for name, (whole, lora) in rows.items():
        assert f"| {name} | {whole} | {'the same' if lora == whole else lora} |" in page


def test_what_is_compared_is_a_forward_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses a clock that counts forwards, in a process that keeps freed memory as a peer does."""
    num_forwards, prepared = 0, []

    def build(config: RunConfig, stage: int, *, device: str) -> torch.nn.Module:
        def count(*_: object) -> None:
            nonlocal num_forwards
            num_forwards += 1

        module = build_stage(config, stage, device=device)
        module.register_forward_hook(count)
        return module

    monkeypatch.setattr(common, "build_stage", build)
    monkeypatch.setattr(memory, "time", SimpleNamespace(process_time=lambda: float(num_forwards)))
    # The real function would make this process keep freed memory, and other tests check that memory is freed.
    monkeypatch.setattr(memory, "compute_like_peers", lambda: prepared.append(num_forwards))
    assert memory.recompute_ratio(_config()) == Ratio(median=2.0, extremes=(2.0, 2.0), interval=(2.0, 2.0))
    assert prepared == [0]
