"""The choice of devices, from made-up reports of devices. The tests need no GPU."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from peers.shared import devices
from peers.shared.devices import (
    Device,
    choose,
    device_of,
    free_ram_bytes,
    graph_bytes,
    here,
    spread,
)

GIB = 1 << 30
CPU, MPS = Device(name="cpu", free_bytes=64 * GIB), Device(name="mps", free_bytes=16 * GIB)


def _gpus(*free_gib: float) -> list[Device]:
    return [Device(name=f"cuda:{number}", free_bytes=int(free * GIB)) for number, free in enumerate(free_gib)]


@pytest.mark.parametrize(
    ("here", "name"),
    [
        ([CPU, MPS], "mps"),
        ([*_gpus(1), MPS, CPU], "cuda:0"),
        ([*_gpus(2, 20, 10), CPU], "cuda:1"),
        ([*_gpus(0, 0), CPU], "cuda:0 or 1"),
    ],
)
def test_a_process_takes_the_gpu_with_the_most_free_memory(here: list[Device], name: str) -> None:
    assert choose(here, random.Random(0)).name in (name, *(["cuda:0", "cuda:1"] if "or" in name else []))


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


@pytest.mark.parametrize(
    ("name", "is_there"),
    [("cuda:99", False), ("mps", torch.backends.mps.is_available()), ("meta", False), ("gpu", False)],
)
def test_a_device_that_cannot_be_used_is_one_line(name: str, is_there: bool) -> None:
    if is_there:
        pytest.skip("it can be used here")
    with pytest.raises(ValueError, match=rf"^--device {name} cannot be used: [^\n]+$"):
        device_of(name, random.Random(0))
