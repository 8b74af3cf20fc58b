"""The findings about a machine: judgements of made-up figures, and checks of this machine."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from peers.doctor import machine
from peers.doctor.finding import State
from peers.doctor.needs import PROGRAM_BYTES, Needs
from peers.shared.devices import Device
from swarm import config as configs
from swarm.config import LoraConfig, OptimizerConfig, OuterConfig, RoundsConfig, RunConfig, StagesConfig

GIB = 1 << 30
CPU = Device(name="cpu", free_bytes=8 * GIB)
GPU = Device(name="cuda:0", free_bytes=8 * GIB)


def _needs(device: float, ram: float = 0.0) -> Needs:
    return Needs(device=int(device * GIB), ram=int(ram * GIB), cache=0, checkpoint=0)


@pytest.mark.parametrize(
    ("needs", "found", "is_auto", "state", "words"),
    [
        ([2.0], CPU, False, State.FINE, "stage 0 takes 2.0 GiB besides what is in flight, and 8.0 GiB of cpu are free"),
        ([2.0, 4.0], CPU, True, State.FINE, "a stage takes 2.0 GiB to 4.0 GiB besides"),
        ([9.0, 4.0], CPU, True, State.WRONG, "take --stage 1, which fits"),
        ([9.0], CPU, False, State.WRONG, "close other programs, take a run with more stages, or another --device"),
        ([9.0, 9.0], CPU, True, State.WRONG, "close other programs"),
    ],
)
def test_memory(needs: Sequence[float], found: Device, is_auto: bool, state: State, words: str) -> None:
    finding = machine.judge_memory(dict(enumerate(map(_needs, needs))), found, 8 * GIB, is_auto=is_auto)
    assert finding.state is state
    assert words in finding.text


def test_a_gpu_needs_ram_beside_it() -> None:
    lacking = machine.judge_memory({3: _needs(2.0, 5.0)}, GPU, 4 * GIB, is_auto=False)
    assert lacking.state is State.WRONG
    assert "stage 3 takes 2.0 GiB" in lacking.text
    assert "beside it 5.0 GiB of RAM, and 4.0 GiB are free" in lacking.text
    assert machine.judge_memory({3: _needs(2.0, 5.0)}, GPU, 6 * GIB, is_auto=False).state is State.FINE


@pytest.mark.parametrize(
    ("limit", "num_peers", "state", "words"),
    [
        (1024, 3, State.FINE, "1024 may be open; about 216 are needed"),
        (None, 3, State.FINE, "any number may be open"),
        (256, 100, State.WRONG, "256 may be open, and about 992 are needed: ulimit -n 1984"),
    ],
)
def test_files(limit: int | None, num_peers: int, state: State, words: str) -> None:
    finding = machine.judge_files(limit, num_peers)
    assert finding.state is state
    assert words in finding.text


def test_disk(tmp_path: Path) -> None:
    assert machine.disk(tmp_path / "not" / "yet", 1, "they").state is State.FINE
    finding = machine.judge_disk(tmp_path, 2 * GIB, GIB, "4 checkpoints")
    assert finding.state is State.WRONG
    assert f"1.0 GiB are free in {tmp_path}, and 4 checkpoints take 2.0 GiB: make room" in finding.text


def test_this_machine_s_own() -> None:
    finding, device = machine.device("cpu")
    assert finding.state is State.FINE
    assert finding.text.startswith("cpu, ")
    assert device is not None
    assert device.free_bytes > 0
    finding, device = machine.device("abacus")
    assert (finding.state, device) == (State.WRONG, None)
    assert "--device abacus cannot be used" in finding.text
    assert machine.files(1).state is State.FINE


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n", "535.183.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n", "570.124.06"),
        ("", ""),
    ],
)
def test_the_driver_says_what_it_is(text: str, version: str) -> None:
    assert machine.driver_version(text) == version


# -- what a stage needs ------------------------------------------------------------------------------------------------


def _config(**changes: object) -> RunConfig:
    import dataclasses

    return dataclasses.replace(configs.load_preset("tiny"), stages=StagesConfig(num_stages=1), **changes)  # type: ignore[arg-type]


def _num_parameters() -> int:
    from swarm.model.stages import build_transformer

    return sum(
        parameter.numel() for parameter in build_transformer(_config(), device=torch.device("meta")).parameters()
    )


def test_needs_are_the_formulas_of_the_docs() -> None:
    """Compare the bytes for each parameter: held, for moments, and while a round is averaged."""
    from swarm.model.loss import loss_bytes

    size = _num_parameters()
    for setting, total, on_device in (("synchronous", 24 + 4 + 24, 24 + 4), ("diloco", 32 + 8 + 24, 20 + 8)):
        rounds, adamw = RoundsConfig(setting=setting), OptimizerConfig(name="adamw")  # type: ignore[arg-type]
        config = _config(rounds=rounds, optimizer=adamw, outer=OuterConfig())
        loss = loss_bytes(config.model, config.data.tokens_per_microbatch)
        assert Needs.of(config, 0, on_gpu=False).device == total * size + loss + PROGRAM_BYTES
        gpu = Needs.of(config, 0, on_gpu=True)
        loss = loss_bytes(config.model, config.data.tokens_per_microbatch, fused=True)
        assert (gpu.device, gpu.ram) == (on_device * size + loss, (total - on_device) * size + PROGRAM_BYTES)
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
