"""compose.yaml's services train together: their commands are run as they stand there, each on a machine of its own.

Where there is no container engine, a network namespace stands for a container, and a folder for a volume.
"""

import shlex
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # transformers brings it

from peers.commands import command_line
from peers.local.supervisor import Child, Supervisor
from peers.stage_peer import server
from scripts.benches.shared.internet import Internet, missing
from tests.support.swarm import wait_until

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose.yaml"


class _Services:
    """The services of compose.yaml, of which some run."""

    def __init__(self, folder: Path, children: Supervisor, internet: Internet) -> None:
        self._folder = folder
        self._children = children
        self._internet = internet
        self._services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
        self._running: dict[str, Child] = {}
        self.names = tuple(self._services)

    def start(self, name: str) -> Child:
        """Start a service once those that it depends on are there, and healthy where it asks for that."""
        if name not in self._running:
            for other, how in self._services[name].get("depends_on", {}).items():
                self.start(other)
                if how["condition"] == "service_healthy":
                    test = shlex.split(self._in_folders(other, self._services[other]["healthcheck"]["test"]))
                    wait_until(partial(_succeeds, test), 100.0, other)
            program, *arguments = shlex.split(self._in_folders(name, self._services[name]["command"]))
            home = self._folder / name
            home.mkdir()
            environment = {"HOME": str(home), "XDG_CACHE_HOME": str(home)}
            command = ["env", "-C", str(home), *command_line(program.removeprefix("swarm-"), arguments)]
            host = self._internet.public_host()
            self._running[name] = self._children.start(name, host.command(command), environment=environment)
        return self._running[name]

    def _in_folders(self, name: str, text: str) -> str:
        for volume in self._services[name].get("volumes", []):
            source, target = volume.split(":")[:2]
            folder = self._folder / f"volume-{source}"
            folder.mkdir(exist_ok=True)
            text = text.replace(target, str(folder))
        return text


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, check=False).returncode == 0


def test_a_peer_that_is_told_to_stop_has_the_time_that_its_round_may_take() -> None:
    """Engines kill a container after ten seconds, unless the file says otherwise."""
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"].values()
    peers = [service for service in services if service["command"].startswith("swarm-peer")]
    assert len(peers) == 3
    for peer in peers:
        seconds = float(peer["stop_grace_period"].removesuffix("s"))
        assert seconds > server.LAST_ROUND_SECONDS + server.LAST_DRAIN_SECONDS


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_services_train_together(internet: Internet, children: Supervisor, tmp_path: Path) -> None:
    services = _Services(tmp_path, children, internet)
    for name in services.names:
        services.start(name)
    trainer = services.start("trainer")
    ended: dict[str, int] = {}

    def trainer_has_ended() -> bool:
        ended.update({e.name: e.returncode for e in children.exits()})
        return bool(ended)

    wait_until(trainer_has_ended, 250.0, f"the trainer's end; see {trainer.log}")
    assert ended == {"trainer": 0}, trainer.log.read_text()
    rows = (tmp_path / "trainer" / "swarm-output" / "metrics.jsonl").read_text().splitlines()
    assert any('"step": 5' in row for row in rows)


def test_the_image_has_every_extra_that_its_programs_need_and_copies_what_is_there() -> None:
    lines = (ROOT / "Containerfile").read_text(encoding="utf-8").splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert {"swarm", "peers", "pyproject.toml"} <= set(copied)
