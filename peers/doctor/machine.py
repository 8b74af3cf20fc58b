"""Checks of this machine alone: device and driver, memory, disk, open files.

The functions that compare are pure; the others ask the system.
"""

import re
import resource
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

from peers.doctor.finding import Finding, fine, wrong
from peers.shared.devices import Device, device_of, here
from peers.shared.room import Room, Served
from swarm.machine.out_of_memory import in_words
from swarm.machine.words import counted

OWN_FILES, FILES_OF_A_PEER = 192, 8
"""The most files that a stage peer opens: a fixed number for itself, and so many more for each other peer of the
run."""
_DRIVER = Path("/proc/driver/nvidia/version")


def device(name: str, memory_bytes: int | None = None) -> tuple[Finding, Device | None]:
    """Find the device that `--device name` means, and check that PyTorch can use it. Imports torch, for seconds. With
    `memory_bytes` the peer is to have so many of its memory."""
    import random

    import torch

    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        try:
            found = here(device_of(name, random.SystemRandom()), memory_bytes)
        except ValueError as error:
            return wrong("device", str(error)), None
    driver = driver_version(_DRIVER.read_text() if _DRIVER.exists() else "")
    if found.kind == "cuda":
        text = f"{found.name}, {torch.cuda.get_device_name(found.name)}, driver {driver or 'unknown'}"
        return fine("device", f"{text}, {in_words(found.free_bytes)} free"), found
    if name == "auto" and found.kind == "cpu" and driver:
        return wrong("device", _why_no_gpu(driver, torch.version.cuda, [str(one.message) for one in complaints])), found
    threads = f", {counted(torch.get_num_threads(), 'thread')}" if found.kind == "cpu" else ""
    return fine("device", f"{found.name}{threads}"), found


def driver_version(text: str) -> str:
    """The version of NVIDIA's kernel module in the text of /proc/driver/nvidia/version; empty if there is none."""
    match = re.search(r"Kernel Module\D*(?:for x86_64|for aarch64)?\s+(\d+(?:\.\d+)+)", text)
    return match[1] if match else ""


def _why_no_gpu(driver: str, cuda: str | None, complaints: Sequence[str]) -> str:
    if cuda is None:
        return (
            f"an NVIDIA GPU is here (driver {driver}), and this PyTorch is built without CUDA: install one with it, or "
            "give --device cpu"
        )
    said = f" ({complaints[0].partition('(')[0].strip()})" if complaints else ""
    return (
        f"an NVIDIA GPU is here (driver {driver}), and PyTorch for CUDA {cuda} cannot use it{said}: install a newer "
        "driver, or give --device cpu"
    )


def files(num_peers: int) -> Finding:
    """Whether a process may have enough files, and so connections, open for a run with `num_peers` peers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_files(limit if limit != resource.RLIM_INFINITY else None, num_peers)


def judge_files(limit: int | None, num_peers: int) -> Finding:
    """Compare the limit of open files (None if there is none) with what a run of `num_peers` peers needs."""
    needed = OWN_FILES + FILES_OF_A_PEER * num_peers
    if limit is None or limit >= needed:
        return fine("files", f"{'any number' if limit is None else limit} may be open; about {needed} are needed")
    return wrong("files", f"{limit} may be open, and about {needed} are needed: ulimit -n {max(1024, 2 * needed)}")


def judge_memory(room: Room, span: Served | None) -> Finding:
    """Compare what all of a run's stages need with the memory that a peer may have. `span` are the blocks that it is to
    serve together; None: one that it takes by itself."""
    if fault := room.fault(span):
        return wrong("memory", fault)
    fitting = [str(stage) for stage, needs in room.each.items() if room.holds(needs)]
    some = f": --stage auto takes {' or '.join(fitting)}" if span is None and len(fitting) < len(room.each) else ""
    return fine("memory", room.comparison(span) + some)


def disk(folder: Path, needed_bytes: int, what: str) -> Finding:
    """Whether a folder can be written to, and has room for what will be there."""
    place = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return wrong("disk", f"{folder}: {error.strerror}")
    return judge_disk(folder, needed_bytes, free, what)


def judge_disk(folder: Path, needed_bytes: int, free_bytes: int, what: str) -> Finding:
    text = f"{in_words(free_bytes)} are free in {folder}, and {what} take {in_words(needed_bytes)}"
    if needed_bytes <= free_bytes:
        return fine("disk", text)
    return wrong("disk", f"{text}: make room, or name another folder")
