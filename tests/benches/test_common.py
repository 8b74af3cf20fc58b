"""The parts of the benches that can be wrong without anybody noticing: configurations, references, names."""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.supervisor import Child, Supervisor
from scripts.benches import __main__ as command
from scripts.benches import common, startup
from scripts.benches.catalogue import module_of
from scripts.benches.common import SwarmProcesses, largest_of, wait_for_json, with_corpus, write_config, write_json
from scripts.benches.parity import Options, _config
from scripts.benches.reference import Reference
from swarm import config as configs
from swarm.config import DataConfig, RunConfig
from swarm.errors import DeadlineExceeded, PeerUnavailable


@pytest.fixture
def run_config(tmp_path: Path) -> RunConfig:
    """The parity bench's run, on a small text of its own."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} bottles\n" for number in range(3000)))
    config = _config(Options(dataset=str(text)))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, held_out_fraction=0.05))


def test_a_written_configuration_reads_back_the_same(tmp_path: Path) -> None:
    data = DataConfig(dataset='a "quoted" name', held_out_fraction=1e-3)
    config = dataclasses.replace(RunConfig(), data=data)
    write_config(config, tmp_path / "run.toml")
    assert configs.load(tmp_path / "run.toml") == config


def test_the_reference_steps_on_the_mean_gradient_of_the_microbatches_that_count(run_config: RunConfig) -> None:
    """Leaving all but one microbatch out is a round of that microbatch alone, once or twice counted."""
    config, data = with_corpus(run_config)
    only_first = {index: 0 for index in range(1, config.microbatches_per_round)}
    once, twice, plain = (Reference(config, data) for _ in range(3))
    once.step(0, only_first)
    twice.step(0, {0: 2, **only_first})
    plain.step(0)
    for name, weight in once.weights.items():
        torch.testing.assert_close(twice.weights[name], weight)
    assert any(not torch.allclose(plain.weights[name], weight) for name, weight in once.weights.items())


@pytest.mark.parametrize("name", ["codecs", "hop", "wire"])
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
    """A swarm without peers, whose trainer is a line of the shell's in the trainer's folder."""

    line = ""

    def launch_trainer(self, name: str, *arguments: Any, **options: Any) -> Child:
        self.metrics(name).parent.mkdir(parents=True)
        return self.children.start(name, ["sh", "-c", f"cd {self.metrics(name).parent} && {self.line}"])


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Trained]:
    for module in (common, startup):
        monkeypatch.setattr(module, "STALL_SECONDS", 1.0)
    with Supervisor(tmp_path / "logs", grace_seconds=1.0) as children:
        yield _Trained(RunConfig(), children, tmp_path)


def test_a_trainer_is_waited_for_as_long_as_it_takes_steps(trained: _Trained) -> None:
    trained.line = """for i in 1 2 3 4 5; do sleep 0.3; echo '{"train/loss": 2.0}' >> metrics.jsonl; done"""
    assert len(trained.train("slow", 5)) == 5


@pytest.mark.parametrize("work", [lambda swarm: swarm.train("trainer", 1), startup._first_step], ids=["train", "start"])
@pytest.mark.parametrize("first", ["true", """echo '{"train/loss": 2.0}' >> metrics.jsonl"""], ids=["none", "one"])
@pytest.mark.timeout(30)
def test_a_trainer_that_takes_no_step_or_does_not_end_is_given_up(
    first: str, work: Callable[[_Trained], object], trained: _Trained
) -> None:
    trained.line = f"{first}; echo waiting for nobody; sleep 60"
    with pytest.raises(DeadlineExceeded, match=r"^trainer took no step for 1 s; the last that it said: waiting"):
        work(trained)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_error_is_larger_than_one_that_is_not_finite(value: float, place: int) -> None:
    errors = [1.0, 3.0, 2.0]
    assert largest_of(errors) == 3.0
    assert largest_of([*errors[:place], value, *errors[place:]]) == math.inf


def test_an_unknown_name_gets_the_list_of_benches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "speed"])
    assert command.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(name in line for name in command.BENCHES)
