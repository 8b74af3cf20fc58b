"""Programs on the hosts of a small internet (internet.py), each peer with files of its own in one folder.

Used by the benches nat and joining. Never measures anything.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peers.commands import command_line
from peers.local.supervisor import Child, Supervisor, last_line
from scripts.benches.shared.internet import Host
from swarm.errors import DeadlineExceeded

START_SECONDS = 60.0
"""Longest wait until a process is useful."""


@dataclass(frozen=True)
class Hosted:
    """The processes of one bench."""

    children: Supervisor
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, added to this process's own."""

    def start(self, host: Host, name: str, program: str, options: Sequence[object]) -> Child:
        """Start one of swarm's programs on a host."""
        command = host.command(command_line(program, list(map(str, options))))
        return self.children.start(name, command, environment=self.environment)

    def peer(self, host: Host, name: str, options: Sequence[object]) -> Child:
        """Start a peer on a host without waiting; once it serves, its `ready` file exists."""
        own = ["--name", name, "--identity", self.folder / f"{name}.pem", "--threads", "1", "--device", "cpu"]
        events = self.folder / "events"
        files = ["--ready-file", self.ready(name), "--events", events / f"{name}.jsonl"]
        events.mkdir(exist_ok=True)
        return self.start(host, name, "peer", [*options, *own, *files])

    def ready(self, name: str) -> Path:
        """A peer's ready file."""
        return self.folder / f"{name}.json"

    def serving_peer(self, host: Host, name: str, options: Sequence[object]) -> Child:
        """Start a peer on a host, and wait until it serves. Raises DeadlineExceeded if that takes a minute."""
        child = self.peer(host, name, options)
        wait_for(child, self.ready(name).exists)
        return child


def invite_of(peer: Child) -> str:
    """The invite that a serving peer has printed."""
    return next(line.split()[2] for line in peer.log.read_text().splitlines() if "join:" in line)


def wait_for(child: Child, is_there: Callable[[], object], *, seconds: float = START_SECONDS) -> None:
    """Wait until `is_there` is true, which the child has to bring about. Raises DeadlineExceeded, with the child's last
    line."""
    deadline = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"waited {seconds:.0f} s for {child.name}, which said: {last_line(child.log)}")
        time.sleep(0.05)
