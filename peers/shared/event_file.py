"""A process's event log: opened before the process joins a run, and begun once it knows which run it has joined."""

import json
import os
from pathlib import Path

import swarm
from peers.shared.sole_writer import require_sole_writer
from swarm.averaging.agreement.shares import counted_rounds
from swarm.config import RunConfig
from swarm.events import EventLog, Events, Start
from swarm.machine.clock import Clock


def open_events(path: Path | None, clock: Clock) -> Events:
    """The event log, or one that writes nothing if no path is given. Raises ValueError if another process writes to the
    file, and OSError if the file can neither be opened nor made."""
    if path is None:
        return Events()
    path.parent.mkdir(parents=True, exist_ok=True)
    require_sole_writer(path, f"--events {path}")
    return EventLog(path, clock)


def begin(events: Events, path: Path | None, start: Start) -> None:
    """Write a process's first event. Raises ValueError if the file has another run's: neither could be audited."""
    if path is not None and (other := _run_in(path)) not in (None, start.run):
        raise ValueError(f"--events {path} is of another run, {other}: give this one a file of its own")
    events.write(start)


def _run_in(path: Path) -> str | None:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                return str(json.loads(line)["run"])
            except (ValueError, KeyError, TypeError):  # Half a line that a full disk has left, say.
                continue
    return None


def start_of(config: RunConfig, *, peer_id: str, name: str, stage: int) -> Start:
    """A process's first event; `stage` is -1 for a trainer."""
    return Start(
        run=config.run_id, peer=peer_id, name=name, stage=stage, setting=config.rounds.setting,
        num_stages=config.stages.num_stages,
        num_fragments=1 if config.rounds.synchronous else config.averaging.num_fragments,
        round_microbatches=config.microbatches_per_round,
        most_samples=config.rounds.round_samples * counted_rounds(config),
        paths=config.paths if len(config.paths) > 1 else (),
        software=swarm.__version__, pid=os.getpid(), boot=_boot_id(),
    )  # fmt: skip


def _boot_id() -> str:
    """An id of the machine's present boot, which no other boot has. Empty if the system does not provide one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
