"""Code that benches share: configurations, files for which processes wait, and a peer's settings."""

import asyncio
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peers.local.supervisor import Child, Supervisor
from scripts.benches.__main__ import module_of
from scripts.benches.shared import swarm
from scripts.benches.shared.common import all_there, largest_of, put, wait_for_json, write_config, write_json
from scripts.benches.shared.swarm import SwarmProcesses
from swarm import config as configs
from swarm.config import DataConfig, RunConfig
from swarm.errors import DeadlineExceeded, PeerUnavailable


def test_a_written_configuration_reads_back_the_same(tmp_path: Path) -> None:
    data = DataConfig(dataset='a "quoted" name', held_out_fraction=1e-3)
    config = dataclasses.replace(RunConfig(), data=data)
    write_config(config, tmp_path / "run.toml")
    assert configs.load(tmp_path / "run.toml") == config


@pytest.mark.parametrize("name", ["codecs", "hop"])
def test_what_is_timed_in_the_bench_s_own_process_has_a_peer_s_settings(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare() -> None:
        raise InterruptedError("nothing was measured before this")

    bench = module_of(name)
    monkeypatch.setattr(bench, "compute_like_peers", prepare)
    with pytest.raises(InterruptedError):
        bench.run(bench.Options())


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


class _Clock:
    """Stands in for the module time: with each look at the clock, as many seconds pass as a function gives."""

    sleep, time = staticmethod(time.sleep), staticmethod(time.time)

    def __init__(self, passing: Callable[[], float]) -> None:
        self._passing = passing
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += self._passing()
        return self._now


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Trained]:
    monkeypatch.setattr(swarm, "STALL_SECONDS", 1.0)
    with Supervisor(tmp_path / "logs", grace_seconds=1.0) as children:
        yield _Trained(RunConfig(), children, tmp_path)


def test_a_trainer_is_waited_for_as_long_as_it_takes_steps(trained: _Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0

    def passing() -> float:
        nonlocal seen
        before, seen = seen, len(trained.steps("slow"))
        return 0.6 * (seen - before)

    monkeypatch.setattr(swarm, "time", _Clock(passing))
    trained.line = """for i in 1 2 3 4 5; do sleep 0.1; echo '{"train/loss": 2.0}' >> metrics.jsonl; done"""
    assert len(trained.train("slow", 5)) == 5


@pytest.mark.parametrize("first", ["true", """echo '{"train/loss": 2.0}' >> metrics.jsonl"""], ids=["none", "one"])
@pytest.mark.timeout(30)
def test_a_trainer_that_takes_no_step_or_does_not_end_is_given_up(
    first: str, trained: _Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passing() -> float:
        log = trained.folder / "logs" / "trainer.log"
        return 0.3 if log.exists() and "waiting" in log.read_text() else 0.0

    monkeypatch.setattr(swarm, "time", _Clock(passing))
    trained.line = f"{first}; echo waiting for nobody; sleep 60"
    with pytest.raises(DeadlineExceeded, match=r"^trainer took no step for 1 s; the last that it said: waiting"):
        trained.train("trainer", 1)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_error_is_larger_than_one_that_is_not_finite(value: float, place: int) -> None:
    errors = [1.0, 3.0, 2.0]
    assert largest_of(errors) == 3.0
    assert largest_of([*errors[:place], value, *errors[place:]]) == math.inf


async def test_who_waits_reads_what_all_have_written(tmp_path: Path) -> None:
    paths = [tmp_path / f"{member}.record" for member in range(2)]
    waiting = asyncio.create_task(all_there(paths))
    put(paths[0], "one")
    await asyncio.sleep(0)
    assert not waiting.done()
    put(paths[1], "two")
    assert await asyncio.wait_for(waiting, timeout=10) == ["one", "two"]
    assert sorted(os.listdir(tmp_path)) == ["0.record", "1.record"], "no unfinished file stays"
