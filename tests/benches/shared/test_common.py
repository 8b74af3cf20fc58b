"""Code that benches share: configurations, files for which processes wait, and a peer's settings."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from peers.local.supervisor import Child, Supervisor
from scripts.benches.shared import swarm
from scripts.benches.shared.common import wait_for_json, write_config, write_json
from scripts.benches.shared.swarm import SwarmProcesses
from swarm import config as configs
from swarm.config import DataConfig, RunConfig
from swarm.errors import DeadlineExceeded, PeerUnavailable


def test_a_written_configuration_reads_back_the_same(tmp_path: Path) -> None:
    data = DataConfig(dataset='a "quoted" name', held_out_fraction=1e-3)
    config = dataclasses.replace(RunConfig(), data=data)
    write_config(config, tmp_path / "run.toml")
    assert configs.load(tmp_path / "run.toml") == config


def test_a_child_that_ends_is_noticed_by_who_waits_for_its_file(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as children:
        children.start("short", [sys.executable, "-c", "print('no luck')"])
        with pytest.raises(PeerUnavailable, match="short ended early: no luck"):
            wait_for_json(tmp_path / "never.json", children)
        write_json(tmp_path / "there.json", {"port": 7})
        assert wait_for_json(tmp_path / "there.json", children) == {"port": 7}


class _Trained(SwarmProcesses):
    """A swarm without peers. Its trainer is a shell command that runs in the trainer's folder."""

    line = ""

    def launch_trainer(self, name: str, *arguments: Any, **options: Any) -> Child:
        self.metrics(name).parent.mkdir(parents=True)
        return self.children.start(name, ["sh", "-c", f"cd {self.metrics(name).parent} && {self.line}"])


def test_a_trainer_is_waited_for_while_it_takes_steps_and_given_up_if_it_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Supervisor(tmp_path / "logs", grace_seconds=1.0) as children:
        trained = _Trained(RunConfig(), children, tmp_path)
        trained.line = """for i in 1 2 3; do echo '{"train/loss": 2.0}' >> metrics.jsonl; sleep 0.1; done"""
        assert len(trained.train("slow", 3)) == 3
        monkeypatch.setattr(swarm, "STALL_SECONDS", 0.5)
        trained.line = "echo waiting for nobody; sleep 60"
        with pytest.raises(DeadlineExceeded, match=r"^stuck took no step for 0 s; the last that it said: waiting"):
            trained.train("stuck", 1)
