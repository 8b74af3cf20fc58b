"""The choice of devices, from made-up reports of devices. The tests need no GPU."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from peers.shared import devices
from peers.shared.devices import (
    Device,
    choose,
    device_of,
    devices_of,
    free_ram_bytes,
    graph_bytes,
    here,
    spread,
    unused,
)
from swarm.config import ModelConfig, RunConfig

GIB = 1 << 30
CPU, MPS = Device(name="cpu", free_bytes=64 * GIB), Device(name="mps", free_bytes=16 * GIB)


def _gpus(*free_gib: float) -> list[Device]:
    return [Device(name=f"cuda:{number}", free_bytes=int(free * GIB)) for number, free in enumerate(free_gib)]


@pytest.mark.parametrize(
    ("here", "name"),
    [
        ([CPU], "cpu"),
        ([CPU, MPS], "mps"),
        ([*_gpus(1), MPS, CPU], "cuda:0"),
        ([*_gpus(2, 20, 10), CPU], "cuda:1"),
        ([*_gpus(0, 0), CPU], "cuda:0 or 1"),
    ],
)
def test_a_process_takes_the_gpu_with_the_most_free_memory(here: list[Device], name: str) -> None:
    assert choose(here, random.Random(0)).name in (name, *(["cuda:0", "cuda:1"] if "or" in name else []))


@pytest.mark.parametrize(
    ("here", "names"),
    [
        ([*_gpus(80, 80, 80), CPU], ["cuda:0", "cuda:1", "cuda:2"]),
        ([*_gpus(80, 60, 79), CPU], ["cuda:0", "cuda:2"]),
        ([*_gpus(40, 60, 10), CPU], ["cuda:1"]),
        ([CPU], ["cpu"]),
    ],
)
def test_a_process_with_several_stages_takes_the_gpus_that_nobody_uses(here: list[Device], names: list[str]) -> None:
    """If all are in use, it takes the one that one stage would have."""
    of_80 = [replace(device, total_bytes=80 * GIB) if device.kind == "cuda" else device for device in here]
    assert [device.name for device in unused(of_80, random.Random(0))] == names


def test_several_devices_are_for_several_stages() -> None:
    assert [str(one) for one in devices_of("cpu", random.Random(0), for_span=True)] == ["cpu"]
    with pytest.raises(ValueError, match="--device cpu,cpu names a device twice"):
        devices_of("cpu,cpu", random.Random(0), for_span=True)
    with pytest.raises(ValueError, match="--device cpu,mps: one stage is on one device; several need --stage 1-3, say"):
        devices_of("cpu,mps", random.Random(0), for_span=False)


@pytest.mark.parametrize(
    ("here", "num_processes", "numbers"),
    [
        ([*_gpus(80, 80), CPU], 5, [0, 1, 0, 1, 0]),
        ([*_gpus(24, 80), CPU], 5, [1, 1, 1, 0, 1]),
        ([*_gpus(24, 0)], 3, [0, 0, 0]),
    ],
)
def test_a_swarm_s_processes_are_spread_by_free_memory(
    here: list[Device], num_processes: int, numbers: Sequence[int]
) -> None:
    assert [device.name for device in spread(here, num_processes)] == [f"cuda:{number}" for number in numbers]
    # One more process does not move those that are there.
    assert spread(here, num_processes + 1)[:num_processes] == spread(here, num_processes)


@pytest.mark.parametrize(
    ("device", "needed_gib", "num_processes", "gib"),
    [
        (_gpus(80)[0], 20, 1, 30),
        (_gpus(80)[0], 10, 2, 15),
        (_gpus(8)[0], 10, 1, 0),
        (CPU, 0, 8, 2),
        (MPS, 8, 1, 2),
        (Device(name="cpu", free_bytes=64 * GIB, given_bytes=1), 0, 1, 32),
    ],
)
def test_graphs_take_a_share_of_what_is_free(device: Device, needed_gib: int, num_processes: int, gib: int) -> None:
    assert graph_bytes(device, needed_bytes=needed_gib * GIB, num_processes=num_processes) == gib * GIB


# -- this machine ------------------------------------------------------------------------------------------------------


def test_the_ram_that_is_free_is_the_least_of_what_the_limits_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit(folder: Path, most: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text("1000000\n")
        (folder / "memory.stat").write_text("anon 600000\ninactive_file 400000\n")

    monkeypatch.setattr(devices, "_CGROUPS", tmp_path)
    monkeypatch.setattr(devices, "_OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text("0::/job/step\n")
    of_machine = free_ram_bytes()
    assert of_machine > 0
    limit(tmp_path / "job", "max")
    assert free_ram_bytes() == pytest.approx(of_machine, rel=0.5)
    limit(tmp_path / "job", "3000000")
    assert free_ram_bytes() == 2_400_000
    limit(tmp_path / "job" / "step", "2000000")
    assert free_ram_bytes() == 1_400_000
    assert dataclasses.replace(here(torch.device("cpu")), own_bytes=0) == Device(name="cpu", free_bytes=1_400_000)


def test_memory_that_the_user_gives_overrides_what_is_free() -> None:
    device = here(torch.device("cpu"), 10_000 * GIB)
    assert device.own_bytes > 10 << 20
    assert device.free_bytes + device.own_bytes == device.all_bytes == 10_000 * GIB
    little = here(torch.device("cpu"), 1 << 20)
    assert (little.free_bytes, little.all_bytes) == (0, 1 << 20)


@pytest.mark.parametrize(
    ("name", "is_there"),
    [("cuda:99", False), ("mps", torch.backends.mps.is_available()), ("meta", False), ("gpu", False)],
)
def test_a_device_that_cannot_be_used_is_one_line(name: str, is_there: bool) -> None:
    if is_there:
        pytest.skip("it can be used here")
    with pytest.raises(ValueError, match=rf"^--device {name} cannot be used: [^\n]+$"):
        device_of(name, random.Random(0))


@pytest.mark.parametrize("name", ["foo", "meta", "cuda:x", "auto:0", ""])
def test_what_is_no_device_is_told_which_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^--device {name} cannot be used: it takes cpu, cuda, cuda:N, mps or auto$"):
        device_of(name, random.Random(0))


def test_a_swarm_on_one_machine_names_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [*_gpus(8, 8), CPU]
    monkeypatch.setattr(devices, "found", lambda: here)
    assert devices.named("auto") == here
    assert devices.named("cuda") == here[:2]
    assert devices.named("cuda:1") == here[1:2]
    assert [device.name for device in devices.named("cpu")] == ["cpu"]
    with pytest.raises(ValueError, match="--device cuda:2 cannot be used: this machine has cuda:0, cuda:1, cpu"):
        devices.named("cuda:2")


@pytest.mark.parametrize(
    ("capability", "autocast"), [(None, "off"), ((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")]
)
def test_products_are_in_the_type_that_the_device_computes_fast(
    capability: tuple[int, int] | None, autocast: str
) -> None:
    assert devices.fast_products(capability) == autocast


def test_a_run_leaves_the_type_of_products_to_each_device() -> None:
    run, cpu = RunConfig(model=ModelConfig(autocast="auto")), torch.device("cpu")
    assert devices.computing_in(run, None, cpu).model.autocast == "off"
    assert devices.computing_in(run, "bf16", cpu).model.autocast == "bf16"
    assert devices.computing_in(RunConfig(model=ModelConfig(autocast="bf16")), None, cpu).model.autocast == "bf16"


@pytest.mark.parametrize(
    ("autocast", "capability", "is_told"),
    [("bf16", (7, 5), True), ("bf16", (8, 0), False), ("fp16", (7, 0), False), ("off", (7, 5), False)],
)
def test_a_gpu_that_emulates_bfloat16_says_what_to_write_instead(
    autocast: Literal["off", "bf16", "fp16"], capability: tuple[int, int], is_told: bool
) -> None:
    advice = devices.bf16_advice(ModelConfig(autocast=autocast), capability)
    assert ("--dtype fp16" in advice and "capability 7.5" in advice) == is_told == bool(advice)


@pytest.mark.parametrize(
    ("gpu", "autocast", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.0),
        ("NVIDIA A100-SXM4-40GB", "off", 156.0),
        ("Tesla T4", "fp16", 65.0),
        ("NVIDIA T400 4GB", "fp16", 0.0),
    ],
)
def test_the_peak_of_a_common_gpu_is_known(gpu: str, autocast: str, tflops: float) -> None:
    assert devices.known_peak_tflops(gpu, autocast) == tflops


def test_a_peak_that_is_given_counts() -> None:
    assert devices.peak_flops(2.5, RunConfig(), None, torch.device("cpu")) == 2.5e12
    assert devices.peak_flops(0.0, RunConfig(), None, torch.device("cpu")) == 0.0
