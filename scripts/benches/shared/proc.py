"""What Linux tells of processes, and of this machine; see proc(5).

Used by the benches that count CPU time, memory, bytes and children. A process that has ended and was waited for raises
OSError, where nothing else is said. Never changes anything but what a peak is counted from.
"""

import os
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")

# -- a process ---------------------------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """The CPU seconds that a process has used so far, without its children's."""
    return sum(_ticks(pid)[:2]) / os.sysconf("SC_CLK_TCK")


def cpu_seconds_of_all(pid: int) -> float:
    """The CPU seconds that a process has used so far, with those of its children, even of ended ones."""
    return sum(_ticks(pid)) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds_of_all, children(pid)))


def is_zombie(pid: int) -> bool:
    """Whether a process has ended and has not been waited for yet."""
    return _stat(pid)[0] == "Z"


def children(pid: int) -> dict[int, str]:
    """The names of a process's children by their ids, whichever of its threads forked them; none where it has ended."""
    found: dict[int, str] = {}
    # Threads and children may end while they are read.
    with suppress(OSError):
        for thread in os.listdir(PROC / str(pid) / "task"):
            with suppress(OSError):
                for number in (PROC / str(pid) / "task" / thread / "children").read_text(encoding="ascii").split():
                    with suppress(OSError):
                        found[int(number)] = (PROC / number / "comm").read_text(encoding="utf-8").strip()
    return found


def status(pid: int | str = "self") -> dict[str, str]:
    """What `status` of proc(5) says of a process, by its names, such as "Threads"."""
    lines = (PROC / str(pid) / "status").read_text(encoding="utf-8").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def num_descriptors(pid: int) -> int:
    """Files, sockets and the like that a process has open."""
    return len(os.listdir(PROC / str(pid) / "fd"))


def resident_bytes(pid: int | str = "self") -> int:
    """The bytes that a process has in memory now, without those of its programs' files."""
    return _bytes(status(pid)["RssAnon"])


def peak_bytes() -> int:
    """The most bytes that this process ever had in memory, or had since `forget_peak`."""
    found = status()
    return _bytes(found["VmHWM"]) - _bytes(found["RssFile"])


def forget_peak() -> None:
    """Have `peak_bytes` count anew from now on."""
    (PROC / "self" / "clear_refs").write_text("5", encoding="ascii")


def written_bytes(pid: int) -> int:
    """The bytes that a process has ever written, to sockets and to files."""
    (line,) = (line for line in (PROC / str(pid) / "io").read_text().splitlines() if line.startswith("wchar:"))
    return int(line.split()[1])


# -- the machine -------------------------------------------------------------------------------------------------------


def loopback_bytes() -> int:
    """The bytes that this machine has ever sent to itself."""
    (line,) = (line for line in (PROC / "net" / "dev").read_text().splitlines() if line.lstrip().startswith("lo:"))
    return int(line.split()[1])


def idle_and_all_ticks() -> tuple[float, float]:
    """The ticks for which this machine's cores were idle so far, and all their ticks."""
    # user, nice, system, idle, iowait, irq, softirq, steal
    ticks = [float(word) for word in (PROC / "stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def _stat(pid: int) -> list[str]:
    """The fields after the name, which may hold anything: the state is the first, which proc(5) numbers 3."""
    return (PROC / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def _ticks(pid: int) -> list[int]:
    """User and system time, and those of the children that were waited for: fields 14 to 17."""
    return [int(field) for field in _stat(pid)[11:15]]


def _bytes(value: str) -> int:
    """The bytes in a value like "12 kB"."""
    return int(value.split()[0]) << 10
