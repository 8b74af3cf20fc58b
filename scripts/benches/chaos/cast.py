"""The processes of a swarm under chaos. Each is started again after it has died; `tick` must be called continually.

A role stands for a user's machine: its folder, key, ports, network line and logs stay the same over all its starts.
"""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from peers.local.supervisor import Child, Exit, Supervisor
from peers.shared import cli
from peers.shared.stage_choice import StageChoice, StagesOrAuto
from peers.stage_peer.options import PeerOptions
from peers.trainer.options import TrainerOptions
from scripts.benches.chaos.program import TASKS_FILE, set_clock
from scripts.benches.shared import proc
from scripts.benches.shared.common import POLL_SECONDS, START_SECONDS, say
from scripts.benches.shared.ports import free_ports
from scripts.benches.shared.swarm import NEVER
from scripts.benches.shared.throttle import Link, Throttle
from swarm.errors import DeadlineExceeded, PeerUnavailable
from swarm.rpc.endpoint import host_and_port

USAGE_SECONDS = 5.0


@dataclass(eq=False)
class Role:
    """A machine of the swarm, and the process that it runs at the moment."""

    name: str
    told: StagesOrAuto | None  # The stages that it was told to serve; None for a trainer
    folder: Path
    link: Link
    stages: Sequence[int] = ()  # Those that it serves, or served last
    endpoint: str = ""
    dht_port: int = 0
    address: str = ""  # Where others enter the DHT here
    child: Child | None = None  # None while it is dead
    restart_at: float = math.inf  # Monotonic
    ready: bool = False  # A trainer counts as ready at once
    frozen: bool = False
    ended_by_us: bool = False

    @property
    def alive(self) -> bool:
        return self.child is not None and self.ready and not self.frozen

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def clock(self) -> Path:
        return self.folder / "clock"

    @property
    def ready_file(self) -> Path:
        return self.folder / "ready.json"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The resources that a process held at a time (monotonic seconds)."""

    at: float
    name: str
    pid: int
    resident_bytes: int
    num_descriptors: int
    num_threads: int
    num_tasks: int


@dataclass(eq=False)
class Cast:
    folder: Path
    config: Path
    children: Supervisor
    throttle: Throttle
    checkpoint_every: int
    disk: Path  # Where all checkpoints are written
    environment: Mapping[str, str] = field(default_factory=dict)
    allow_class: tuple[str, ...] = ()  # The classes that a peer that joins has to allow
    roles: list[Role] = field(default_factory=list)
    unexpected: list[Exit] = field(default_factory=list)  # Processes that ended without having been told to, and why
    capacity: list[tuple[float, float]] = field(default_factory=list)
    """By monotonic time, the live peers of the stage that has fewest of them, over what it would be if all lived."""
    usage: list[Usage] = field(default_factory=list)  # The resources that all live processes held, every few seconds
    _looked_at: float = 0.0

    def add(self, num_stages: int, peers: Sequence[int | StagesOrAuto], trainers: int) -> None:
        """Add peers that are told to serve these stages of a run."""
        for number, told in enumerate(peers):
            span = StageChoice(told, told) if isinstance(told, int) else told
            self._add(f"peer-{number}", span, () if span == "auto" else span.stages(num_stages))
        for number in range(trainers):
            self._add(f"trainer-{number}", None)

    def peers(self, stage: int | None = None) -> list[Role]:
        """All peers, or those of a stage."""
        return [role for role in self.roles if role.told is not None and (stage is None or stage in role.stages)]

    def trainers(self) -> list[Role]:
        return [role for role in self.roles if role.told is None]

    def begin(self) -> None:
        """Start all roles: the first peer, the other peers, and then the trainers. Raises DeadlineExceeded and
        PeerUnavailable."""
        peers = self.peers()
        for batch in (peers[:1], peers[1:]):
            deadline = time.monotonic() + START_SECONDS
            for role in batch:
                self.start(role)
            while not all(role.ready for role in batch):
                self.tick()
                if self.unexpected:
                    raise PeerUnavailable(f"{self.unexpected[0].name} ended early: {self.unexpected[0].reason}")
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"the peers do not serve after {START_SECONDS:.0f} s: is the machine busy?")
                time.sleep(POLL_SECONDS)
        for role in self.trainers():
            self.start(role)

    def tick(self) -> None:
        """Check which processes have ended and which serve, start again those that are due, and record which are
        alive."""
        now = time.monotonic()
        for end in self.children.exits():
            role = next(role for role in self.roles if role.name == end.name)
            role.child, role.ready, role.frozen = None, False, False
            if not role.ended_by_us:
                say(f"{role.name} ended by itself: {end.reason}")
                self.unexpected.append(end)
                role.restart_at = now + 2.0
        for role in self.roles:
            if role.child is None and now >= role.restart_at:
                self.start(role)
            if role.child is not None and (not role.ready or role.told == "auto") and role.ready_file.exists():
                ready = json.loads(role.ready_file.read_text())
                role.ready, role.address, role.stages = True, ready["dht_addresses"][0], ready["stages"]
        if now - self._looked_at > USAGE_SECONDS:
            self._looked_at = now
            self.usage += [used for role in self.roles if role.alive and (used := _usage(role, now))]
        alive = self._fewest([role for role in self.peers() if role.alive])
        self.capacity.append((now, alive / self._fewest(self.peers())))

    def start(self, role: Role) -> None:
        role.ready_file.unlink(missing_ok=True)
        role.ended_by_us = False
        set_clock(role.clock, 0.0)
        arguments = self._trainer(role) if role.told is None else self._peer(role)
        name = "trainer" if role.told is None else "peer"
        command = [sys.executable, "-m", "scripts.benches.chaos.program", name, str(role.clock), *arguments]
        environment = {**self.environment, **role.link.environment}
        role.child = self.children.start(role.name, command, environment=environment)
        role.ready = role.told is None

    def kill9(self, role: Role, down_seconds: float) -> None:
        assert role.child is not None
        self.children.kill9(role.child)
        role.child, role.ready, role.frozen = None, False, False
        role.restart_at = time.monotonic() + down_seconds

    def restart(self, role: Role) -> None:
        assert role.child is not None
        role.ended_by_us, role.restart_at = True, 0.0
        os.kill(role.child.pid, signal.SIGTERM)

    def freeze(self, role: Role) -> None:
        assert role.child is not None
        os.kill(role.child.pid, signal.SIGSTOP)
        role.frozen = True

    def thaw(self, role: Role) -> None:
        if role.child is not None and role.frozen:
            os.kill(role.child.pid, signal.SIGCONT)
            role.frozen = False

    def fill_disk(self) -> Callable[[], None]:
        """Fill the disk to which checkpoints are written. Return a function that makes room again."""
        filler = self.disk / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(65536))
        return lambda: filler.unlink(missing_ok=True)

    def _fewest(self, roles: Sequence[Role]) -> float:
        """The peers of the stage that has fewest of them. A peer of several stages is an equal part of one at each."""
        stages = {stage for role in self.peers() for stage in role.stages}
        return min(sum(1 / len(role.stages) for role in roles if stage in role.stages) for stage in stages)

    def _add(self, name: str, told: StagesOrAuto | None, stages: Sequence[int] = ()) -> None:
        folder = self.folder / name
        folder.mkdir(parents=True)
        role = Role(name=name, told=told, stages=stages, folder=folder, link=self.throttle.link())
        if told is not None:
            port, role.dht_port = free_ports(2)
            role.endpoint = f"127.0.0.1:{port}"
            self.throttle.serve(role.endpoint, role.link)
        self.roles.append(role)

    def _peer(self, role: Role) -> list[str]:
        assert role.told is not None
        checkpoints = self.disk / role.name
        checkpoints.mkdir(exist_ok=True)
        addresses = self._addresses(role)
        options = PeerOptions(
            stage=role.told, name=role.name, host="127.0.0.1", port=host_and_port(role.endpoint)[1],
            dht_port=role.dht_port, threads=1, device="cpu", ready_file=role.ready_file,
            identity=role.folder / "identity.pem", checkpoint=checkpoints, checkpoint_every=self.checkpoint_every,
            resume=checkpoints, events=role.events, initial_peers=addresses,
            allow_class=self.allow_class if addresses else (), config=None if addresses else self.config,
        )  # fmt: skip
        return cli.arguments(options)

    def _trainer(self, role: Role) -> list[str]:
        options = TrainerOptions(
            initial_peers=self._addresses(role), steps=NEVER, output=role.folder / "output", evaluate_every=0,
            name=role.name, events=role.events,
        )  # fmt: skip
        return cli.arguments(options)

    def _addresses(self, role: Role) -> tuple[str, ...]:
        return tuple(other.address for other in self.peers() if other is not role and other.address)


def _usage(role: Role, now: float) -> Usage | None:
    """The resources that a role's process holds; None if the process has just died or just begun."""
    assert role.child is not None
    try:
        status = proc.status(role.child.pid)
        num_descriptors = proc.num_descriptors(role.child.pid)
        num_tasks = int((role.folder / TASKS_FILE).read_text() or 0)
    except OSError:
        return None
    if "VmRSS" not in status:
        return None
    return Usage(
        at=now, name=role.name, pid=role.child.pid, resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
        num_descriptors=num_descriptors, num_threads=int(status["Threads"]), num_tasks=num_tasks,
    )  # fmt: skip
