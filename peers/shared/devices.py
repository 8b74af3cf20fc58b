"""Which device a process computes on, and how much of its memory autograd graphs may take.

A process that asks a GPU for its free memory takes hundreds of MB of it until it ends. So where there are several GPUs,
a short-lived child asks: python -m peers.shared.devices prints this machine's devices, as JSON.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import random
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from peers.shared import stopping
from swarm.config import ModelConfig, RunConfig

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

ALIKE = 0.9
"""GPUs with at least this share of the most free memory count as equally free. Chance decides among them, because
processes that start together see the same figures."""
GPU_SHARE, RAM_SHARE = 0.5, 0.25
"""The share that a stage's graphs may take of the memory that is free beside its weights and optimizer. The rest of a
GPU, or of the memory that the user gives, is for computing one microbatch. Other programs need RAM too, and the system
kills a process that takes too much."""
ASKING_SECONDS = 60.0
PEAK_TFLOPS = {
    "H200": (989.0, 495.0),
    "H100 PCIe": (756.0, 378.0),
    "H100": (989.0, 495.0),
    "A100": (312.0, 156.0),
    "L40S": (362.0, 183.0),
    "L4": (121.0, 60.0),
    "A10": (125.0, 62.5),
    "V100": (125.0, 15.7),
    "T4": (65.0, 8.1),
    "RTX 4090": (165.0, 82.6),
    "RTX 3090": (71.0, 35.6),
}
"""For common GPUs, TFLOP/s of 16-bit products that are added up in float32, and of float32 products, which are TF32
where the GPU has it."""
Dtype = Literal["fp32", "bf16", "fp16"]
"""A type of matrix products, as --dtype names it."""
LEAST_BF16_CAPABILITY = (8, 0)
"""The first GPUs that compute in bfloat16 (A100, RTX 30). Earlier ones (V100, T4, RTX 20) emulate it, which is slow."""
_NAME = re.compile("auto|(cpu|cuda|mps)(:[0-9]+)?")
_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True, kw_only=True)
class Device:
    """Something to compute on: `cpu`, `mps` or `cuda:N`, with the bytes that are free there.

    Attributes:
        own_bytes: what this process has taken there already.
        given_bytes: what the user gives this process there; None for what it finds.
    """

    name: str
    free_bytes: int
    own_bytes: int = 0
    given_bytes: int | None = None
    total_bytes: int = 0
    """All bytes of a GPU; 0 of others."""

    @property
    def all_bytes(self) -> int:
        """What this process may have there, with what it has taken already."""
        return self.free_bytes + self.own_bytes if self.given_bytes is None else self.given_bytes

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]


# -- decisions ---------------------------------------------------------------------------------------------------------


def choose(devices: Sequence[Device], rng: random.Random) -> Device:
    """The device for one process: a CUDA GPU, the one with the most free memory; else mps; else the CPU."""
    best = _best_kind(devices)
    most = max(device.free_bytes for device in best)
    return rng.choice([device for device in best if device.free_bytes >= ALIKE * most])


def unused(devices: Sequence[Device], rng: random.Random) -> list[Device]:
    """The devices for one process that serves several stages: all CUDA GPUs of which nobody else uses memory. If there
    are none, the one that `choose` takes."""
    free = [device for device in devices if device.kind == "cuda" and device.free_bytes >= ALIKE * device.total_bytes]
    return free or [choose(devices, rng)]


def spread(devices: Sequence[Device], num_processes: int) -> list[Device]:
    """A device for each process: the one with the most free memory for each of the processes that would share it."""
    best, taken, chosen = _best_kind(devices), Counter[str](), []
    for _ in range(num_processes):
        device = max(best, key=lambda device: device.free_bytes / (taken[device.name] + 1))
        taken[device.name] += 1
        chosen.append(device)
    return chosen


def _best_kind(devices: Sequence[Device]) -> list[Device]:
    best = min((device.kind for device in devices), key=("cuda", "mps", "cpu").index)
    return [device for device in devices if device.kind == best]


def graph_bytes(device: Device, *, needed_bytes: int = 0, num_processes: int = 1) -> int:
    """The bytes of a device's memory that the autograd graphs of one process may take. `needed_bytes` says how much of
    the free memory the process will take for other things. `num_processes` says how many processes share the device."""
    share = GPU_SHARE if device.kind == "cuda" or device.given_bytes is not None else RAM_SHARE
    return int(share * max(0, device.free_bytes // num_processes - needed_bytes))


def computing_in(config: RunConfig, dtype: Dtype | None, device: "torch.device") -> RunConfig:
    """The run's configuration with this type of matrix products; None leaves the run's, which `auto` leaves to the
    device. On a GPU, products of float32 are then computed in TF32."""
    import torch

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    autocast = config.model.autocast if dtype is None else "off" if dtype == "fp32" else dtype
    if autocast == "auto":
        autocast = fast_products(capability)
    if autocast == "off" and device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, autocast=autocast))


def fast_products(capability: tuple[int, int] | None) -> Literal["off", "bf16", "fp16"]:
    """The type in which a GPU of this CUDA capability computes products fast; "off" where there is no such GPU."""
    if capability is None:
        return "off"
    return "bf16" if capability >= LEAST_BF16_CAPABILITY else "fp16"


def in_words(config: RunConfig, device: "torch.device") -> str:
    """How a device computes a run's products, in words that follow "computes"."""
    products = {"off": "in TF32" if device.type == "cuda" else "in fp32", "bf16": "in bf16", "fp16": "in fp16"}
    again = ", each layer again in the backward" if config.model.gradient_checkpointing else ""
    return f"{products[config.model.autocast]} on {device}{again}"


def bf16_advice(model: ModelConfig, capability: tuple[int, int]) -> str:
    """What to tell about a model's matrix products on a GPU of this CUDA capability; empty if there is nothing."""
    if model.autocast != "bf16" or capability >= LEAST_BF16_CAPABILITY:
        return ""
    return (
        "this GPU (CUDA capability {}.{}) only emulates bfloat16, which is slow: give --dtype fp16, or begin the run "
        "with --set model.autocast=fp16"
    ).format(*capability)


def known_peak_tflops(gpu: str, autocast: str) -> float:
    """The TFLOP/s of matrix products, without sparsity, that a GPU's maker names; 0 for one that is not listed. `gpu`
    is the GPU's name, as CUDA has it."""
    narrow, single = next((peaks for name, peaks in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", gpu)), (0.0, 0.0))
    return single if autocast == "off" else narrow


# -- this machine's devices --------------------------------------------------------------------------------------------


def devices_of(names: str, rng: random.Random, *, for_span: bool) -> list["torch.device"]:
    """The torch devices for `--device` with one name or several, for a process that serves one stage or, `for_span`,
    adjacent ones. Raises ValueError as device_of does, or if one stage is to be on several devices."""
    import torch

    parts = names.split(",")
    if for_span and names in ("auto", "cuda") and torch.cuda.device_count() > 1:
        parts = [device.name for device in unused(found(), rng)]
    if len(parts) > 1 and not for_span:
        raise ValueError(f"--device {names}: one stage is on one device; several need --stage 1-3, say, or all")
    if len(set(parts)) < len(parts):
        raise ValueError(f"--device {names} names a device twice")
    return [device_of(part, rng) for part in parts]


def device_of(name: str, rng: random.Random) -> "torch.device":
    """The torch device for `--device name`; for `auto` and `cuda`, the one that `choose` takes. Raises ValueError if
    there is no such device, or this PyTorch cannot compute on it."""
    import torch

    # PyTorch would list the devices of all machines there are.
    if not _NAME.fullmatch(name):
        raise ValueError(f"--device {name} cannot be used: it takes cpu, cuda, cuda:N, mps or auto")
    is_there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not is_there.get(name.partition(":")[0], True):
        raise ValueError(f"--device {name} cannot be used: PyTorch finds no such GPU here")
    try:
        if name in ("auto", "cuda") and torch.cuda.is_available():
            name = choose(found(), rng).name if torch.cuda.device_count() > 1 else "cuda:0"
        elif name == "auto":
            name = "mps" if torch.backends.mps.is_available() else "cpu"
        device = torch.device(name)
        # A GPU that this build of PyTorch does not support allocates memory, but fails to compute.
        torch.zeros(1, device=device).add_(1).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} cannot be used: {stopping.first_line(error)}") from None
    return device


def found() -> list[Device]:
    """This machine's devices, as a child process that imports torch reports them. Raises OSError if the child did not
    report them."""
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-m", "peers.shared.devices"],
            capture_output=True,
            text=True,
            timeout=ASKING_SECONDS,
            check=True,
        )
        return [Device(**device) for device in json.loads(result.stdout)]
    except (subprocess.SubprocessError, ValueError) as error:
        raise OSError(f"the devices of this machine could not be asked: {error}") from None


def named(name: str) -> list[Device]:
    """All devices that `--device name` of swarm-local stands for. Raises ValueError if this machine has none of that
    name, and OSError as `found` does."""
    if name == "cpu":
        return [Device(name="cpu", free_bytes=free_ram_bytes())]
    devices = found()
    if matching := [device for device in devices if name in ("auto", device.name, device.kind)]:
        return matching
    raise ValueError(f"--device {name} cannot be used: this machine has {', '.join(d.name for d in devices)}")


def warn_of_emulation(model: ModelConfig, device: "torch.device") -> None:
    import torch

    if device.type == "cuda" and (advice := bf16_advice(model, torch.cuda.get_device_capability(device))):
        logger.warning("%s", advice)


def peak_flops(given_tflops: float, config: RunConfig, dtype: Dtype | None, device: "torch.device") -> float:
    """The floating-point operations in a second that a device manages at best in a run's type; 0 if not known.
    `given_tflops` is what the user says; 0 if nothing."""
    import torch

    if not given_tflops and device.type == "cuda":
        given_tflops = known_peak_tflops(
            torch.cuda.get_device_name(device), computing_in(config, dtype, device).model.autocast
        )
    return given_tflops * 1e12


def here(device: "torch.device", memory_bytes: int | None = None) -> Device:
    """A device that this process computes on, with the bytes that are free for this process; if the user gives it
    `memory_bytes` there, what is left of these."""
    import torch

    free_bytes, own_bytes, total_bytes = free_ram_bytes(), resident_bytes(), 0
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        own_bytes = torch.cuda.memory_allocated(device)
        # What torch holds without using it is free as well, for this process.
        free_bytes += torch.cuda.memory_reserved(device) - own_bytes
    elif device.type == "mps":
        # MPS takes its memory from the machine's, up to a limit.
        own_bytes = torch.mps.driver_allocated_memory()
        free_bytes = min(free_bytes, torch.mps.recommended_max_memory() - own_bytes)
    if memory_bytes is not None:
        free_bytes = memory_bytes - own_bytes
    return Device(
        name=str(device), free_bytes=max(0, free_bytes), own_bytes=own_bytes, given_bytes=memory_bytes,
        total_bytes=total_bytes,
    )  # fmt: skip


def free_ram_bytes() -> int:
    """The bytes that this process may still take: the machine, its container and its own limit all allow them."""
    free = [psutil.virtual_memory().available, _free_in_cgroups()]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free.append(limit - psutil.Process().memory_info().vms)
    return int(min(free))


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def most_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def most_device_bytes(device: "torch.device") -> int:
    """The most bytes of a GPU that were in use; for MPS, which keeps no record, those in use now; for the CPU 0."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(torch.mps.driver_allocated_memory()) if device.type == "mps" else 0


def num_cores() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


def _free_in_cgroups() -> float:
    """The bytes that cgroups (version 2) of a container, service or cluster job leave; infinite without a limit."""
    own = _CGROUPS
    with contextlib.suppress(OSError):
        own /= _OWN_CGROUP.read_text().partition("::")[2].strip().lstrip("/")
    return min(_free_in_cgroup(folder) for folder in (own, *own.parents))


def _free_in_cgroup(folder: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        # The kernel gives up pages of files when memory is short, so they count as free.
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(statistics.get("inactive_file", "0")))
    return math.inf


def _all_here() -> list[Device]:
    import torch

    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps"))
    return [here(device) for device in (*devices, torch.device("cpu"))]


if __name__ == "__main__":
    print(json.dumps([dataclasses.asdict(device) for device in _all_here()]))
