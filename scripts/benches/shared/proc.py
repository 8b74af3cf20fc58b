"""What Linux says about processes and about this machine; see proc(5).

Unless a docstring says otherwise, the functions raise OSError for a process that has ended and was waited for.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from scripts.benches.shared.common import say

PROC = Path("/proc")


def cpu_seconds(pid: int) -> float:
    """The CPU seconds that a process has used so far, without its children's."""
    return sum(_ticks(pid)[:2]) / os.sysconf("SC_CLK_TCK")


def cpu_seconds_of_all(pid: int) -> float:
    """The CPU seconds that a process and its children, ended ones included, have used so far."""
    return sum(_ticks(pid)) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds_of_all, children(pid)))


def children(pid: int) -> dict[int, str]:
    """The names of a process's children, by their ids; none if the process has ended. It does not matter which thread
    forked them."""
    found: dict[int, str] = {}
    # Threads and children may end while their files are read.
    with suppress(OSError):
        for thread in os.listdir(PROC / str(pid) / "task"):
            with suppress(OSError):
                for number in (PROC / str(pid) / "task" / thread / "children").read_text(encoding="ascii").split():
                    with suppress(OSError):
                        found[int(number)] = (PROC / number / "comm").read_text(encoding="utf-8").strip()
    return found


def status(pid: int | str = "self") -> dict[str, str]:
    """The fields of a process's `status` file (proc(5)), by their names, such as "Threads"."""
    lines = (PROC / str(pid) / "status").read_text(encoding="utf-8").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def held_bytes(field: str, pid: int | str = "self") -> int:
    """The bytes in a field of `status` like "12 kB"."""
    return int(status(pid)[field].split()[0]) << 10


def num_descriptors(pid: int) -> int:
    return len(os.listdir(PROC / str(pid) / "fd"))


def resident_bytes(pid: int | str = "self") -> int:
    """The bytes that a process has in memory now, without those of mapped files."""
    return held_bytes("RssAnon", pid)


def peak_bytes() -> int:
    """The most bytes that this process had in memory, since its start or since the last `forget_peak`."""
    return held_bytes("VmHWM") - held_bytes("RssFile")


def forget_peak() -> None:
    (PROC / "self" / "clear_refs").write_text("5", encoding="ascii")


def written_bytes(pid: int) -> int:
    """The bytes that a process has ever written, to sockets and to files."""
    (line,) = (line for line in (PROC / str(pid) / "io").read_text().splitlines() if line.startswith("wchar:"))
    return int(line.split()[1])


def loopback_bytes() -> int:
    """The bytes that this machine has ever sent to itself."""
    (line,) = (line for line in (PROC / "net" / "dev").read_text().splitlines() if line.lstrip().startswith("lo:"))
    return int(line.split()[1])


@contextmanager
def gpu_busy_shares(device: torch.device) -> Iterator[list[float]]:
    """The shares of time in which a GPU was busy, as nvidia-smi says every quarter of a second of the block. They are
    there once the block has ended; none where there is no such program, or for a CPU."""
    shares = list[float]()
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        yield shares
        return
    # nvidia-smi may have other numbers for the GPUs.
    own = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", own, "--loop-ms=250"]
    watching = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    try:
        yield shares
    finally:
        watching.terminate()
        try:
            said, _ = watching.communicate(timeout=10.0)
        except subprocess.TimeoutExpired:
            watching.kill()
            said, _ = watching.communicate()
        shares += [float(line) / 100 for line in said.split() if line.isdecimal()]


def _ticks(pid: int) -> list[int]:
    """Fields 14 to 17 of `stat`: user and system time of the process, and of its children that were waited for. The
    process's name, which comes before them, may contain any character."""
    fields = (PROC / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return [int(field) for field in fields[11:15]]


def busy(share: float) -> list[str]:
    """The command of a process that uses this share of one core until it is killed."""
    return [sys.executable, "-c", _BUSY, str(share)]


_BUSY = """
import sys, time
share = float(sys.argv[1])
while True:
    until = time.perf_counter() + 0.02 * share
    while time.perf_counter() < until:
        pass
    time.sleep(0.02 * (1 - share))
"""


SAY_ABOVE = 0.1  # If other processes use more than this share of the cores' time, a line says so


class Company:
    """The other processes of this machine, observed from the moment when this object is made."""

    def __init__(self) -> None:
        self._began = _busy_and_all()

    def share(self) -> float | None:
        """The share of all cores' time since then that other processes used. This process and its children, dead ones
        included, do not count. None if the system does not say. Prints a line if it is above SAY_ABOVE."""
        ended = _busy_and_all()
        if self._began is None or ended is None or ended[1] <= self._began[1]:
            return None
        share = max(0.0, round((ended[0] - self._began[0]) / (ended[1] - self._began[1]), 3))
        if share > SAY_ABOVE:
            say(f"other processes used {share:.0%} of this machine's cores meanwhile: speeds may be too low")
        return share


def _busy_and_all() -> tuple[float, float] | None:
    """The ticks for which the cores have been busy with other processes until now, and all ticks."""
    try:
        # user, nice, system, idle, iowait, irq, softirq, steal
        ticks = [float(word) for word in (PROC / "stat").read_text().splitlines()[0].split()[1:9]]
        own = cpu_seconds_of_all(os.getpid()) * os.sysconf("SC_CLK_TCK")
    except OSError:
        return None
    return sum(ticks) - ticks[3] - ticks[4] - own, sum(ticks)
