"""swarm-local with children that are only written down: what it refuses, deletes, waits for and kills."""

import asyncio
import dataclasses
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from peers.local import program as local
from peers.local.program import LocalOptions, LocalPeer, LocalSwarm
from peers.local.supervisor import Child, Exit, Supervisor
from peers.shared import cli
from peers.shared.devices import Device
from peers.status.live_table import LiveTable
from swarm import config as configs
from swarm.credentials.identity import generate
from swarm.errors import PeerUnavailable
from swarm.metrics.log import MetricsLog
from swarm.rpc.channels import ChannelPool

DEMO = Path(__file__).parents[3] / "scripts" / "demo"
OLD = ("logs/peer-1.log", "logs/peer-2.log", "logs/trainer.log", "summary.json", "loss.png", "sample.txt")
_CHOSEN = ("--preset", "--config", "--checkpoint", "--checkpoint-every")


class _Process(subprocess.Popen[bytes]):
    """A process that nobody started."""

    def __init__(self) -> None:
        self.args, self.returncode = "", 0

    def __del__(self) -> None:
        pass


class _Children(Supervisor):
    """Writes down what is to be started, and a first line into each log."""

    def __init__(self, log_folder: Path) -> None:
        super().__init__(log_folder)
        self.folder = log_folder
        self.commands: dict[str, list[str]] = {}
        self.ended: list[Exit] = []
        self.killed: list[str] = []

    def start(self, name: str, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None) -> Child:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}.log").open("a") as log:
            log.write("begins\n")
        self.commands[name] = [str(word) for word in command]
        child = Child(name=name, log=self.folder / f"{name}.log", process=_Process())
        self._running.append(child)
        return child

    def kill9(self, child: Child) -> None:
        self._running.remove(child)
        self.killed.append(child.name)

    def exits(self) -> list[Exit]:
        ended, self.ended = self.ended, []
        return ended


def _swarm(tmp_path: Path, **options: object) -> tuple[LocalSwarm, _Children]:
    children = _Children(tmp_path / "out" / "logs")
    values = LocalOptions(**{"output": tmp_path / "out", **options})  # type: ignore[arg-type]
    identity = generate()
    places = [Device(name=f"cuda:{number % 2}", free_bytes=8 << 30) for number in range(8)]
    swarm = LocalSwarm(values, configs.load_preset("tiny"), children, tmp_path, identity, places)
    swarm.channels = ChannelPool(insecure=True, identity=identity)
    return swarm, children


def _write_ready_file(path: Path) -> None:
    identity = generate()
    ready = {
        "peer_id": identity.peer_id, "time": 0.0, "endpoint": "127.0.0.1:1", "dht_addresses": ["/ip4/127.0.0.1"],
        "certificate_pem": identity.certificate_pem, "device": "cpu",
    }  # fmt: skip
    path.write_text(json.dumps(ready))


def _serve(swarm: LocalSwarm, peer: LocalPeer) -> None:
    _write_ready_file(peer.ready_file)
    assert swarm._is_ready(peer)


def _leave_old_files(output: Path) -> None:
    for name in (*OLD, "logs/mine.txt", "metrics.jsonl"):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(json.dumps({"step": 60, "train/loss": 2.0, "train/tokens_per_sec": 1.0}) + "\n")


def _metrics(swarm: LocalSwarm) -> MetricsLog:
    return MetricsLog(swarm.options.output / "metrics.jsonl")


def _add_step(swarm: LocalSwarm, step: int) -> None:
    with (swarm.options.output / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "train/loss": 1.0, "train/tokens_per_sec": 1.0}) + "\n")


def test_each_peer_has_its_device_and_its_part_of_the_memory(tmp_path: Path) -> None:
    swarm, children = _swarm(tmp_path)
    for stage in (0, 1, 2):
        swarm._start_peer(stage)
    commands = [children.commands[f"peer-{number}"] for number in (1, 2, 3)]
    assert [command[command.index("--device") + 1] for command in commands] == ["cuda:0", "cuda:1", "cuda:0"]
    # Half of 8 GiB, which four peers share.
    assert {command[command.index("--graph-memory-mib") + 1] for command in commands} == {"1024"}


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ("--preset small --config x.toml", "--config and --preset exclude each other"),
        ("--wandb-online", "--wandb-online needs --wandb PROJECT"),
        ("--checkpoint-every 5", "--checkpoint-every needs --checkpoint DIR"),
        ("--checkpoint x --checkpoint-every 0", "--checkpoint-every must be at least 1, not 0"),
        ("--stages 0", "--stages must be at least 1, not 0"),
        ("--steps 20 --kill-at 20", "--kill-at must be between 0 and 19, not 20"),
        (
            "--peers-per-stage 1 --kill-at 3 --join-at 4",
            "--kill-at needs --peers-per-stage 2 or more: a stage without a peer stops the run",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_touched(
    argv: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _leave_old_files(tmp_path)
    with pytest.raises(SystemExit) as stop:
        local.main([*argv.split(), "--output", str(tmp_path)])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"swarm-local: error: {complaint} (see swarm-local --help)\n"
    assert all((tmp_path / name).exists() for name in OLD)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["--preset", "tiny"]),
        ({"preset": "small"}, ["--preset", "small"]),
        ({"config": Path("x.toml")}, ["--config", "x.toml"]),
        ({"checkpoint": Path("c")}, ["--preset", "tiny", "--checkpoint", "c"]),
        (
            {"checkpoint": Path("c"), "checkpoint_every": 5},
            ["--preset", "tiny", "--checkpoint", "c", "--checkpoint-every", "5"],
        ),
    ],
)
def test_the_first_peer_gets_what_was_asked_for(
    options: dict[str, object], expected: list[str], tmp_path: Path
) -> None:
    swarm, children = _swarm(tmp_path, **options)
    swarm._start_peer(0)
    command = children.commands["peer-1"]
    options_at = [index for index, word in enumerate(command) if word in _CHOSEN]
    assert [word for index in options_at for word in command[index : index + 2]] == expected


def test_those_who_join_are_told_of_a_model_that_the_user_s_configuration_names(tmp_path: Path) -> None:
    swarm, children = _swarm(tmp_path, config=Path("x.toml"))
    model = dataclasses.replace(swarm.config.model, custom_class="mine:Model")
    swarm.config = dataclasses.replace(swarm.config, model=model)
    _serve(swarm, swarm._start_peer(0))
    swarm._start_peer(1)
    assert "--allow-class" not in children.commands["peer-1"]
    assert " --allow-class mine:Model" in " ".join(children.commands["peer-2"])


# -- the start ---------------------------------------------------------------------------------------------------------


async def test_a_peer_that_does_not_serve_is_named_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "START_SECONDS", 0.0)
    monkeypatch.setattr(local, "START_SECONDS_PER_PEER", 0.0)
    swarm, children = _swarm(tmp_path)
    _serve(swarm, swarm._start_peer(0))
    swarm._start_peer(1)
    log = children.folder / "peer-2.log"
    with LiveTable() as table, pytest.raises(PeerUnavailable, match=f"^peer-2 does not serve after 0 s; .* {log}$"):
        await swarm._until_ready(table)


async def test_the_first_peer_may_take_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "START_SECONDS", 0.0)
    monkeypatch.setattr(local, "START_SECONDS_PER_PEER", 0.0)
    swarm, _ = _swarm(tmp_path)
    start = asyncio.create_task(swarm._start_first_peer())
    await asyncio.sleep(0.15)
    assert not start.done()
    _write_ready_file(tmp_path / "peer-1.json")
    await start


async def test_the_first_peer_is_watched(tmp_path: Path) -> None:
    swarm, children = _swarm(tmp_path)
    children.ended = [Exit(name="peer-1", returncode=2, reason="swarm-peer: error: no such text")]
    with pytest.raises(PeerUnavailable, match=r"^peer-1 did not start: no such text$"):
        await swarm._start_first_peer()


async def test_an_old_log_of_the_first_peer_is_not_taken_for_its_own(tmp_path: Path) -> None:
    _leave_old_files(tmp_path / "out")
    swarm, children = _swarm(tmp_path)
    _write_ready_file(tmp_path / "peer-1.json")
    await swarm._start_first_peer()
    assert (children.folder / "peer-1.log").read_text() == "begins\n"
    assert all((tmp_path / "out" / name).exists() for name in OLD)


@pytest.mark.parametrize("resume", [None, Path("checkpoints")])
def test_what_an_earlier_run_left_is_deleted_once_the_first_peer_serves(resume: Path | None, tmp_path: Path) -> None:
    _leave_old_files(tmp_path / "out")
    swarm, _ = _swarm(tmp_path, resume=resume)
    swarm._start_peer(0)
    swarm._clear()
    left = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    kept = {"metrics.jsonl"} if resume else set()
    assert left == {"logs/peer-1.log", "logs/mine.txt", *kept}


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("swarm-trainer: error: this run is locked", "this run is locked"),
        ("12:00:00 trainer ERROR: o/loss.png is not written: No space left on device", "o/loss.png is not written: No"),
        ("ended by SIGKILL", "ended by SIGKILL"),
    ],
)
async def test_why_the_trainer_failed_is_told_and_not_when(reason: str, told: str, tmp_path: Path) -> None:
    """It may have trained to the end, and found the disk full only then."""
    swarm, children = _swarm(tmp_path)
    swarm.trainer = children.start("trainer", [])
    children.ended = [Exit(name="trainer", returncode=1, reason=reason)]
    with (
        _metrics(swarm) as metrics, LiveTable() as table,
        pytest.raises(PeerUnavailable, match=f"^the trainer failed: {told}"),
    ):  # fmt: skip
        await swarm._watch(table, metrics)


# -- kills and joins ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [None, Path("checkpoints")])
def test_steps_are_counted_from_where_the_run_goes_on(resume: Path | None, tmp_path: Path) -> None:
    _leave_old_files(tmp_path / "out")
    swarm, children = _swarm(tmp_path, resume=resume, kill_at=2, join_at=3)
    for number in range(6):
        _serve(swarm, swarm._start_peer(number % 3))
    swarm._clear()
    # Ten of the steps that the earlier run made are not in its last checkpoint.
    first = 50 if resume else 0
    assert swarm._trainer_rows() == ()
    with _metrics(swarm) as metrics:
        seen = []
        for step in range(first + 1, first + 4):
            _add_step(swarm, step)
            swarm._kill_and_join(swarm._trainer_rows()[0].step, metrics)
            seen.append((len(children.killed), len(children.commands)))
    assert seen == [(0, 6), (1, 6), (1, 7)]
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "event" in row] == [first + 2, first + 3]


def test_the_last_peer_of_a_stage_is_spared(tmp_path: Path) -> None:
    swarm, children = _swarm(tmp_path, kill_at=0)
    for stage in (0, 1, 2):
        _serve(swarm, swarm._start_peer(stage))
    swarm._start_peer(0)
    with _metrics(swarm) as metrics:
        swarm._kill_and_join(0, metrics)
        assert children.killed == []  # The second peer of stage 0 does not serve yet.
        _serve(swarm, swarm.peers[-1])
        swarm._kill_and_join(0, metrics)
        swarm._kill_and_join(0, metrics)
    assert len(children.killed) == 1
    assert {peer.stage for peer in swarm.peers} == {0, 1, 2}


async def test_a_stage_that_has_lost_its_last_peer_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer would wait for ever. A peer that is still starting may be in time."""
    monkeypatch.setattr(local, "LOOK_SECONDS", 0.01)
    swarm, children = _swarm(tmp_path)
    for stage in (0, 1, 2, 1):
        _serve(swarm, swarm._start_peer(stage))
    swarm._start_peer(1)
    swarm._start_trainer()
    names = [peer.child.name for peer in swarm.peers if peer.stage == 1]
    reason = "swarm-peer: error: no memory"
    with LiveTable() as table, _metrics(swarm) as metrics:
        watching = asyncio.create_task(swarm._watch(table, metrics))
        for name in names[:-1]:
            children.ended.append(Exit(name=name, returncode=1, reason=reason))
            await asyncio.sleep(0.1)
            assert not watching.done()
        children.ended.append(Exit(name=names[-1], returncode=1, reason=reason))
        expected = f"^stage 1 has no peer left: {names[-1]} ended by itself: no memory; its log is .*{names[-1]}.log$"
        with pytest.raises(PeerUnavailable, match=expected):
            await asyncio.wait_for(watching, 10.0)


# -- scripts/demo ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "events"),
    [
        ("", "--kill-at 20 --join-at 30"),
        ("--steps 20", ""),
        ("--steps=25", "--kill-at 20"),
        ("--steps 10 --steps 31", "--kill-at 20 --join-at 30"),
        ("--peers-per-stage 1", "--join-at 30"),
        ("--steps many", ""),
        ("--steps 100 --preset small --kill-at 40", "--kill-at 20 --join-at 30"),
    ],
)
def test_the_demo_adds_what_fits(argv: str, events: str, tmp_path: Path) -> None:
    for name, text in (("scripts/setup_venv", "true"), (".venv/bin/swarm-local", 'echo "$@"')):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    demo = tmp_path / "scripts" / "demo"
    demo.write_text(DEMO.read_text())
    output = subprocess.run(["bash", demo, *argv.split()], capture_output=True, text=True, timeout=30, check=True)
    words = ["--stages 3 --peers-per-stage 2 --steps 72 --output swarm-output", events, argv]
    assert output.stdout.split() == " ".join(words).split()
    if "many" not in argv:
        cli.parse(LocalOptions, prog="swarm-local", argv=output.stdout.split())
