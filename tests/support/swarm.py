"""A real swarm for end-to-end tests: the programs themselves, as processes, on loopback."""

import inspect
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.commands import command_line
from peers.local.supervisor import Child, Supervisor
from peers.shared import cli
from peers.shared.stage_choice import StageChoice
from peers.stage_peer.options import PeerOptions
from peers.trainer.options import TrainerOptions
from swarm.types import PeerRecord, PeerState
from tests.support import preloaded

CONFIG = """
run = "test"

[model]
num_layers = 2
d_model = 32
num_heads = 2

[stages]
num_stages = 2

[data]
dataset = "{dataset}"
sequence_length = 32
microbatch_size = 4
held_out_fraction = 0.1

[rounds]
setting = "{setting}"
round_samples = 64
inner_batch_samples = 8

[optimizer]
learning_rate = 3e-3

[outer]
learning_rate = 1.0
momentum = 0.0
"""


def write_text(path: Path) -> Path:
    """Real text that every machine has: some modules of the standard library."""
    path.write_text("".join(inspect.getsource(module) for module in (inspect, json, subprocess)), encoding="utf-8")
    return path


def run(
    program: str, *arguments: str, timeout_seconds: float = 60.0, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. `environment` is added to this process's own."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        command = command_line(program, arguments)
        process = preloaded.spawn(command, {**os.environ, **(environment or {})}, stdout, stderr)
        try:
            process.wait(timeout_seconds)
        finally:
            process.send_signal(signal.SIGKILL)
            returncode = process.wait()
        told = []
        for file in (stdout, stderr):
            file.seek(0)
            told.append(file.read().decode())
    return subprocess.CompletedProcess(command, returncode, *told)


def run_all(*commands: Sequence[str]) -> list[subprocess.CompletedProcess[str]]:
    """Run several programs at the same time, to their ends. Each command is the program's name and its arguments.
    Returns the results in the same order."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda command: run(*command), commands))


def wait_until(condition: Callable[[], Any], timeout_seconds: float, what: str) -> Any:
    """Poll until `condition` is true, and return its value."""
    deadline = time.monotonic() + timeout_seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_seconds:.0f} s for {what}"
        time.sleep(0.05)
    return value


def whole_lines(path: Path) -> list[str]:
    """The whole lines of a file to which another process is writing. A last line without its end is left out."""
    return path.read_text().rpartition("\n")[0].splitlines()


@dataclass(eq=False)
class RealPeer:
    """A started swarm-peer, and the stage that it served first."""

    child: Child
    stage: int
    ready: dict[str, Any]

    @property
    def address(self) -> str:
        """The address at which others enter the DHT."""
        return str(self.ready["dht_addresses"][0])

    @property
    def entry(self) -> str:
        """The address at which swarm-status asks the peer."""
        return f"{self.ready['peer_id']}@{self.ready['endpoint']}"

    @property
    def record(self) -> PeerRecord:
        return PeerRecord(
            peer_id=self.ready["peer_id"], announced_at=0.0, stage=self.stage, endpoint=self.ready["endpoint"],
            certificate_pem=self.ready["certificate_pem"], state=PeerState.SERVING,
        )  # fmt: skip


class RealSwarm:
    """Peers and trainers in a folder, ended with their supervisor."""

    start_seconds = 60.0
    """Longest wait for a peer to serve, and for swarm-status."""
    end_seconds = 90.0
    """Longest wait for a trainer's end."""

    def __init__(
        self, folder: Path, children: Supervisor, *, setting: str = "diloco", changes: Mapping[str, str] | None = None
    ) -> None:
        """`changes` replace what stands in CONFIG."""
        self.folder = folder
        self.children = children
        self.events = folder / "events"  # One log for each process ever started
        self.peers: list[RealPeer] = []
        self.text = write_text(folder / "text.txt")
        self.config = folder / "run.toml"
        config = CONFIG.format(dataset=self.text, setting=setting)
        for old, new in (changes or {}).items():
            assert old in config
            config = config.replace(old, new)
        self.config.write_text(config, encoding="utf-8")
        self.model: Path | None = None  # With which the first peer begins, instead of with `config`
        self._num_started = 0

    @property
    def address(self) -> str:
        """The address of a living peer."""
        return self.peers[0].address

    def start_peers(
        self, stages: Sequence[int | str], *options: str, environment: Mapping[str, str] | None = None
    ) -> list[RealPeer]:
        """Start peers at once, with more options if wanted, and wait until all of them serve."""
        started = [self.launch(stage, *options, environment=environment) for stage in stages]
        return [self.arrived(child, ready_file) for child, ready_file in started]

    def arrived(self, child: Child, ready_file: Path) -> RealPeer:
        wait_until(ready_file.exists, self.start_seconds, f"{child.name} to serve; see {child.log}")
        ready = json.loads(ready_file.read_text())
        self.peers.append(RealPeer(child=child, stage=ready["stage"], ready=ready))
        return self.peers[-1]

    def launch(
        self, stage: int | str, *options: str, environment: Mapping[str, str] | None = None
    ) -> tuple[Child, Path]:
        """Start a peer and do not wait. Return the process, and the file that exists once the peer serves."""
        self._num_started += 1
        name = f"peer-{self._num_started}"
        ready_file = self.folder / f"{name}.json"
        own = PeerOptions(
            stage="auto" if stage == "auto" else StageChoice.parse(str(stage)), name=name, host="127.0.0.1",
            device="cpu", threads=1,
            initial_peers=(self.address,) if self.peers else (),
            config=None if self.peers or self.model else self.config,
            model=None if self.peers or self.model is None else str(self.model),
            identity=self.folder / f"{name}.pem", ready_file=ready_file, events=self.events / f"{name}.jsonl",
        )  # fmt: skip
        command = command_line("peer", [*cli.arguments(own), *options])
        return self.children.start(name, command, environment=environment), ready_file

    def kill(self, peer: RealPeer) -> None:
        """Kill a peer with kill -9."""
        self.peers.remove(peer)
        self.children.kill9(peer.child)

    def start_trainer(self, name: str, *more: str, steps: int, environment: Mapping[str, str] | None = None) -> Child:
        """Start a trainer, with more options if wanted."""
        options = TrainerOptions(
            initial_peers=(self.address,), steps=steps, output=self.folder / name, name=name, evaluate_every=0,
            evaluation_samples=16, events=self.events / f"{name}.jsonl",
        )  # fmt: skip
        command = command_line("trainer", [*cli.arguments(options), *more])
        return self.children.start(name, command, environment=environment)

    def steps(self, trainer: str) -> list[dict[str, Any]]:
        path = self.folder / trainer / "metrics.jsonl"
        rows = [json.loads(line) for line in whole_lines(path)] if path.exists() else []
        return [row for row in rows if "train/loss" in row]

    def wait_for_steps(self, trainer: str, count: int, timeout_seconds: float = 60.0) -> list[dict[str, Any]]:
        log = self.folder / "logs" / f"{trainer}.log"
        wait_until(lambda: len(self.steps(trainer)) >= count, timeout_seconds, f"step {count} of {trainer}: {log}")
        return self.steps(trainer)

    def wait_for_more(self, trainer: str, count: int, timeout_seconds: float = 60.0) -> None:
        """Wait until a trainer has logged this many steps more."""
        self.wait_for_steps(trainer, len(self.steps(trainer)) + count, timeout_seconds)

    def wait_for_end(self, child: Child, timeout_seconds: float | None = None) -> int:
        """Wait until a process has ended, for `end_seconds` unless another time is given. Return its exit code."""

        def ended() -> list[int]:
            return [exit_.returncode for exit_ in self.children.exits() if exit_.name == child.name]

        seconds = self.end_seconds if timeout_seconds is None else timeout_seconds
        codes: list[int] = wait_until(ended, seconds, f"{child.name} to end; see {child.log}")
        return codes[0]

    def interrupt(self, trainer: Child) -> None:
        """Ctrl-C."""
        trainer.process.send_signal(signal.SIGINT)
        assert self.wait_for_end(trainer) == 130

    def audit(self) -> dict[str, Any]:
        """The result of swarm-status --audit for the logs of all processes."""
        logs = map(str, sorted(self.events.iterdir()))
        result = run("status", "--json", "--audit", *logs, timeout_seconds=self.start_seconds)
        assert result.stdout, result.stderr
        report: dict[str, Any] = json.loads(result.stdout)
        assert result.returncode == (0 if report["proven"] else 1)
        return report

    def assert_proven(self) -> None:
        report = self.audit()
        assert report["proven"], report

    def assert_no_tracebacks(self) -> None:
        for log in (self.folder / "logs").iterdir():
            assert "Traceback" not in log.read_text(), log

    def status(self, *, through_dht: bool = False) -> dict[str, Any]:
        """The object that swarm-status --json prints."""
        where = ["--initial-peers", self.address] if through_dht else ["--peer", self.peers[0].entry]
        result = run("status", *where, "--json", timeout_seconds=self.start_seconds)
        assert result.returncode == 0, result.stderr
        view: dict[str, Any] = json.loads(result.stdout)
        return view


@contextmanager
def real_swarm(
    folder: Path, *, setting: str = "diloco", changes: Mapping[str, str] | None = None
) -> Iterator[RealSwarm]:
    """A swarm without peers yet, whose processes end with the block."""
    folder.mkdir(exist_ok=True)
    with Supervisor(folder / "logs", grace_seconds=0.0, spawn=preloaded.spawn) as children:
        yield RealSwarm(folder, children, setting=setting, changes=changes)
