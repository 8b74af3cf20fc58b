"""A local swarm whose child processes are only recorded, and not started."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from peers.local.options import LocalOptions
from peers.local.peers import LocalPeer, LocalPeers
from peers.local.supervisor import Child, Exit, Supervisor
from peers.shared.devices import Device
from swarm import config as configs
from swarm.config import RunConfig
from swarm.credentials.identity import generate

OLD = ("logs/peer-1.log", "logs/peer-2.log", "logs/trainer.log", "summary.json", "loss.png", "sample.txt")
"""What an earlier run leaves in its output folder, and a new one deletes."""


class _Process(subprocess.Popen[bytes]):
    """A process that was never started."""

    def __init__(self) -> None:
        self.args, self.returncode = "", 0

    def __del__(self) -> None:
        pass


class Children(Supervisor):
    """Records the processes that should be started, and writes a first line into each log."""

    def __init__(self, log_folder: Path) -> None:
        super().__init__(log_folder)
        self.folder = log_folder
        self.started: list[Child] = []
        self.commands: dict[str, list[str]] = {}
        self.ended: list[Exit] = []
        self.killed: list[str] = []

    def start(self, name: str, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None) -> Child:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}.log").open("a") as log:
            log.write("begins\n")
        self.commands[name] = [str(word) for word in command]
        child = Child(name=name, log=self.folder / f"{name}.log", process=_Process())
        self.started.append(child)
        return child

    def kill9(self, child: Child) -> None:
        self.started.remove(child)
        self.killed.append(child.name)

    @property
    def running(self) -> list[Child]:
        return list(self.started)

    def exits(self) -> list[Exit]:
        ended, self.ended = self.ended, []
        return ended


def started_peers(
    tmp_path: Path, run: RunConfig | None = None, **options: object
) -> tuple[LocalOptions, LocalPeers, Children]:
    """LocalPeers without any peer yet. Two GPUs are there for eight peers."""
    children = Children(tmp_path / "out" / "logs")
    values = LocalOptions(**{"output": tmp_path / "out", **options})  # type: ignore[arg-type]
    places = [Device(name=f"cuda:{number % 2}", free_bytes=8 << 30) for number in range(8)]
    return values, LocalPeers(values, run or configs.load_preset("tiny"), children, tmp_path, places), children


def write_ready_file(path: Path) -> None:
    """Write a ready file, as a peer does once it serves."""
    identity = generate()
    ready = {
        "peer_id": identity.peer_id, "time": 0.0, "endpoint": "127.0.0.1:1", "dht_addresses": ["/ip4/127.0.0.1"],
        "certificate_pem": identity.certificate_pem, "device": "cpu",
    }  # fmt: skip
    path.write_text(json.dumps(ready))


def serve(peer: LocalPeer) -> LocalPeer:
    """Let a peer serve."""
    write_ready_file(peer.ready_file)
    assert peer.is_ready()
    return peer


def leave_old_files(output: Path) -> None:
    """Write the files that an earlier run leaves, and a file of the user."""
    for name in (*OLD, "logs/mine.txt", "metrics.jsonl"):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(json.dumps({"step": 60, "train/loss": 2.0, "train/tokens_per_sec": 1.0}) + "\n")
