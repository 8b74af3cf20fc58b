"""Peers that join over slow lines, between network namespaces, while the run trains over them."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from peers.local.supervisor import Child, Supervisor
from scripts.benches.nat import Hosted, invite_of, wait_for
from scripts.benches.shared.common import fail_on_exit, run_of, write_config
from scripts.benches.shared.internet import Internet
from scripts.benches.sides.paced_stage import PACE, Paced
from swarm.config import RunConfig
from swarm.metrics import read as read_metrics
from tests.support.nat_swarm import INTERNET

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900), *INTERNET]
BEFORE_SECONDS = 20.0
"""How long training is measured before anybody joins."""
LIMIT_SECONDS = 300.0
SECONDS_PER_SAMPLE = 0.005


@pytest.fixture(autouse=True)
def own_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers import the benches' stages."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")


@pytest.fixture
def hosted(internet: Internet, children: Supervisor, tmp_path: Path) -> Hosted:
    return Hosted(children, tmp_path, {PACE: str(SECONDS_PER_SAMPLE)})


def _config(*, stage_parameters: int, round_samples: int) -> RunConfig:
    """A run whose stages have one layer each, and compute next to nothing."""
    custom_class = f"{Paced.__module__}:{Paced.__name__}"
    return run_of(
        "slow-lines", width=256, layers=2, stages=2, length=128, microbatch=8, round_samples=round_samples,
        model={"d_ff": stage_parameters // 256, "custom_class": custom_class}, data={"max_tokens": 1_000_000},
        optimizer={"learning_rate": 3e-4}, wire={"dtype": "bf16"},
    )  # fmt: skip


class _Run:
    """A run that trains: a peer of stage 0, the donor, which serves stage 1 behind a line of its own, and a trainer."""

    def __init__(self, hosted: Hosted, internet: Internet, config: RunConfig, *, donor_megabits: float) -> None:
        self._hosted, self._internet = hosted, internet
        self._metrics = hosted.folder / "trainer" / "metrics.jsonl"
        self.home, donor_host = internet.public_host(), internet.public_host()
        write_config(config, file := hosted.folder / "run.toml")
        first = hosted.serving_peer(self.home, "first", ["--config", file, "--stage", 0])
        self.invite = invite_of(first)
        self._joining = [self.invite, "--stage", 1, "--allow-class", config.model.custom_class]
        hosted.serving_peer(donor_host, "donor", self._joining)
        internet.limit(donor_host, donor_megabits)
        own = ["--name", "trainer", "--output", self._metrics.parent, "--evaluate-every", 0, "--steps", 10**6]
        events = ["--events", hosted.folder / "events" / "trainer.jsonl", "--evaluation-samples", 8]
        trainer = hosted.start(internet.public_host(), "trainer", "trainer", [self.invite, *own, *events])
        wait_for(trainer, lambda: self.num_steps() >= 2, seconds=120.0)

    def num_steps(self) -> int:
        rows = read_metrics(self._metrics) if self._metrics.exists() else []
        return sum("train/loss" in row for row in rows)

    def step_seconds(self, seconds: float) -> float:
        """How long a step takes, over the next `seconds`."""
        before, began_at = self.num_steps(), time.monotonic()
        while time.monotonic() - began_at < seconds:
            fail_on_exit(self._hosted.children)
            time.sleep(0.2)
        return (time.monotonic() - began_at) / max(1, self.num_steps() - before)

    def join(self, number: int, *, megabits: float) -> Child:
        self._internet.limit(host := self._internet.public_host(), megabits)
        return self._hosted.peer(host, f"joiner-{number}", self._joining)

    def joining_step_seconds(self, joiners: Sequence[Child]) -> float:
        """How long a step takes until all joiners serve, or until it is too late for that."""
        before, began_at = self.num_steps(), time.monotonic()
        while not all(map(self.serves, joiners)) and time.monotonic() - began_at < LIMIT_SECONDS:
            fail_on_exit(self._hosted.children)
            time.sleep(0.2)
        return (time.monotonic() - began_at) / max(1, self.num_steps() - before)

    def serves(self, joiner: Child) -> bool:
        return self._hosted.ready(joiner.name).exists()

    def audit(self) -> dict[str, Any]:
        """End all processes, and audit what they logged."""
        for child in self._hosted.children.running:
            self._hosted.children.kill9(child)
        logs = sorted((self._hosted.folder / "events").iterdir())
        child = self._hosted.start(self.home, "audit", "status", ["--json", "--audit", *logs])
        wait_for(child, lambda: any(end.name == child.name for end in self._hosted.children.exits()))
        report: dict[str, Any] = json.loads(child.log.read_text().splitlines()[-1])
        return report


def test_four_that_join_at_once_through_a_slow_line_all_serve_and_training_goes_on(
    hosted: Hosted, internet: Internet
) -> None:
    run = _Run(hosted, internet, _config(stage_parameters=2_000_000, round_samples=256), donor_megabits=20.0)
    before = run.step_seconds(BEFORE_SECONDS)
    looks = hosted.start(run.home, "status", "status", [run.invite, "--watch", "--json"])
    joiners = [run.join(number, megabits=1000.0) for number in range(4)]
    joining = run.joining_step_seconds(joiners)
    assert all(map(run.serves, joiners))
    assert joining / before < 3.0
    report = run.audit()
    assert report["proven"], report
    views = [json.loads(line) for line in looks.log.read_text().splitlines()[:-1] if line.startswith("{")]
    peers = [{peer["name"]: peer for stage in view["stages"] for peer in stage["peers"]} for view in views]
    assert views
    assert all(names["donor"]["state"] != "unreachable" for names in peers)


def test_a_joiner_whose_line_is_too_slow_says_so_and_slows_nobody(hosted: Hosted, internet: Internet) -> None:
    """Replaying a round takes it longer than the group takes to commit one."""
    run = _Run(hosted, internet, _config(stage_parameters=200_000, round_samples=32), donor_megabits=1000.0)
    before = run.step_seconds(BEFORE_SECONDS)
    joiner = run.join(0, megabits=1.0)
    joining = run.joining_step_seconds([joiner])
    said = joiner.log.read_text().splitlines()
    assert any("falling back" in line and "never arrive" in line for line in said), said
    assert sum("installed the snapshot" in line for line in said) >= 2, said
    assert joining / before < 2.0
    report = run.audit()
    assert report["proven"], report


def test_a_line_that_a_microbatch_fills_for_seconds_is_not_taken_for_dead(hosted: Hosted, internet: Internet) -> None:
    """A microbatch of 1 MiB takes 8 s over it, there and back."""
    config = run_of("thin", width=256, layers=2, stages=2, length=256, microbatch=4, round_samples=8)
    write_config(config, file := hosted.folder / "run.toml")
    hosts = [internet.public_host() for _ in range(2)]
    for host in hosts:
        internet.limit(host, 1.0)
    first = hosted.serving_peer(hosts[0], "first", ["--config", file, "--stage", 0])
    second = hosted.serving_peer(hosts[1], "second", [invite_of(first), "--stage", 1])
    own = ["--name", "trainer", "--output", hosted.folder / "trainer", "--steps", 3]
    few = ["--evaluate-every", 0, "--evaluation-samples", 4]
    trainer = hosted.start(hosts[0], "trainer", "trainer", [invite_of(first), *own, *few])
    wait_for(trainer, lambda: any(end.name == trainer.name for end in hosted.children.exits()), seconds=LIMIT_SECONDS)
    rows = read_metrics(hosted.folder / "trainer" / "metrics.jsonl")
    assert sum("train/loss" in row for row in rows) == 3
    for child in (first, second, trainer):
        said = child.log.read_text().splitlines()
        assert not [line for line in said if "failed" in line or "broke" in line], child.name
