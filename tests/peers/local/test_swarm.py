"""A local swarm whose child processes are only recorded: what it waits for, deletes and kills, and when it gives up."""

import asyncio
import dataclasses
import json
import re
from pathlib import Path

import pytest

from peers.local import swarm as swarms
from peers.local.supervisor import Exit
from peers.local.swarm import Drama, LocalSwarm, Output
from peers.status.live_table import LiveTable
from swarm import config as configs
from swarm.credentials.identity import generate
from swarm.errors import PeerUnavailable
from swarm.metrics import MetricsLog
from tests.peers.local.children import OLD, Children, leave_old_files, serve, started_peers, write_ready_file
from tests.support.chain import eventually


def _swarm(tmp_path: Path) -> tuple[LocalSwarm, Children]:
    options, peers, children = started_peers(tmp_path)
    return LocalSwarm(options, "tiny", peers, children, generate()), children


@pytest.mark.parametrize("dataset", ["class:mine:Rows", "books"])
def test_the_trainer_names_a_class_that_its_user_has_named(dataset: str, tmp_path: Path) -> None:
    """It would not import one because the run names it."""
    config = configs.load_preset("tiny")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dataset=dataset))
    options, peers, children = started_peers(tmp_path, config)
    serve(peers.start(peers.spans[0]))
    LocalSwarm(options, "tiny", peers, children, generate()).start_trainer()
    assert (f"--dataset {dataset}" in " ".join(children.commands["trainer"])) == dataset.startswith("class:")


def _add_step(output: Path, step: int) -> None:
    with (output / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "train/loss": 1.0, "train/tokens_per_sec": 1.0}) + "\n")


async def test_a_peer_that_does_not_serve_is_named_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarms, "START_SECONDS", 0.0)
    monkeypatch.setattr(swarms, "START_SECONDS_PER_PEER", 0.0)
    swarm, children = _swarm(tmp_path)
    serve(swarm.peers.start(swarm.peers.spans[0]))
    swarm.peers.start(swarm.peers.spans[1])
    log = children.folder / "peer-2.log"
    with LiveTable() as table, pytest.raises(PeerUnavailable, match=f"^peer-2 does not serve after 0 s; .* {log}$"):
        await swarm.until_ready(table)


async def test_the_first_peer_may_take_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarms, "START_SECONDS", 0.0)
    monkeypatch.setattr(swarms, "START_SECONDS_PER_PEER", 0.0)
    swarm, _ = _swarm(tmp_path)
    with LiveTable() as table:
        start = asyncio.create_task(swarm.start_first_peer(table))
        await asyncio.sleep(0.15)
        assert not start.done()
        write_ready_file(tmp_path / "peer-1.json")
        await start


async def test_what_peers_warn_of_is_shown_once_and_what_takes_long_says_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(swarms, "TELL_SECONDS", 0.15)
    swarm, _ = _swarm(tmp_path)
    with LiveTable() as table:
        serve(swarm.peers.start(swarm.peers.spans[0]))
        late = [swarm.peers.start(swarm.peers.spans[stage]) for stage in (1, 2)]
        waiting = asyncio.create_task(swarm.until_ready(table))
        for peer in late:
            with peer.child.log.open("a") as log:
                log.write(f"12:00:00 {peer.child.name} WARNING: 3 of 7 rows are left out: [a] has no text\n")
                log.write(f"12:00:01 {peer.child.name} INFO: the text is being prepared: 4 MB so far\n12:00:02 half")
        shown = ""

        def has_told() -> bool:
            nonlocal shown
            shown += capsys.readouterr().out
            waits = re.search(r"waiting for peer-2, peer-3 to serve, \d+ s so far; peer-2: ", shown)
            return waits is not None and "3 of 7 rows" in shown

        await eventually(has_told)
        for peer in late:
            serve(peer)
        await waiting
    shown += capsys.readouterr().out
    assert shown.count("peer-2: 3 of 7 rows are left out: [a] has no text") == shown.count("3 of 7 rows") == 1


async def test_the_first_peer_is_watched(tmp_path: Path) -> None:
    swarm, children = _swarm(tmp_path)
    children.ended = [Exit(name="peer-1", returncode=2, reason="swarm-peer: error: no such text")]
    with LiveTable() as table, pytest.raises(PeerUnavailable, match=r"^peer-1 did not start: no such text$"):
        await swarm.start_first_peer(table)


async def test_an_old_log_of_the_first_peer_is_not_taken_for_its_own(tmp_path: Path) -> None:
    leave_old_files(tmp_path / "out")
    swarm, children = _swarm(tmp_path)
    write_ready_file(tmp_path / "peer-1.json")
    with LiveTable() as table:
        await swarm.start_first_peer(table)
    assert (children.folder / "peer-1.log").read_text() == "begins\n"
    assert all((tmp_path / "out" / name).exists() for name in OLD)


@pytest.mark.parametrize("resume", [None, Path("checkpoints")])
def test_what_an_earlier_run_left_is_deleted_once_the_first_peer_serves(resume: Path | None, tmp_path: Path) -> None:
    leave_old_files(tmp_path / "out")
    Output(tmp_path / "out", goes_on=resume is not None).clear([tmp_path / "out" / "logs" / "peer-1.log"])
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
    """The trainer may have trained to the end, and found the disk full only then."""
    swarm, children = _swarm(tmp_path)
    trainer = children.start("trainer", [])
    children.ended = [Exit(name="trainer", returncode=1, reason=reason)]
    with (
        MetricsLog(swarm.output.metrics) as metrics,
        LiveTable() as table,
        pytest.raises(PeerUnavailable, match=f"^the trainer failed: {told}"),
    ):
        await swarm.watch(trainer, table, metrics)


# -- kills and joins ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [None, Path("checkpoints")])
def test_steps_are_counted_from_where_the_run_goes_on(resume: Path | None, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    leave_old_files(folder)
    options, peers, children = started_peers(tmp_path, resume=resume, kill_at=2, join_at=3)
    output, drama = Output(folder, goes_on=resume is not None), Drama(options, peers)
    for number in range(6):
        serve(peers.start(peers.spans[number % 3]))
    output.clear([])
    # Ten of the steps that the earlier run made are not in its last checkpoint.
    first = 50 if resume else 0
    assert output.trainer_rows() == ()
    seen = []
    for step in range(first + 1, first + 4):
        _add_step(folder, step)
        (row,) = output.trainer_rows()
        happened = drama.act(row.step - output.first_step)
        seen.append((len(happened), len(children.killed), len(children.commands)))
    assert seen == [(0, 0, 6), (1, 1, 6), (1, 1, 7)]


def test_a_peer_that_joins_is_told_of_once_it_serves(tmp_path: Path) -> None:
    options, peers, _ = started_peers(tmp_path, join_at=0)
    serve(peers.start(peers.spans[0]))
    drama = Drama(options, peers)
    assert drama.act(0) == ["peer-2 starts for stage 1"]
    assert drama.act(0) == []
    serve(peers.running[-1])
    assert drama.act(0) == ["peer-2 joined stage 1"]
    assert drama.act(0) == []
    assert drama.num_joined == 1


def test_the_last_peer_of_a_stage_is_spared(tmp_path: Path) -> None:
    options, peers, children = started_peers(tmp_path, kill_at=0)
    for stage in (0, 1, 2):
        serve(peers.start(peers.spans[stage]))
    peers.start(peers.spans[0])
    drama = Drama(options, peers)
    assert drama.act(0) == []
    assert children.killed == []  # The second peer of stage 0 does not serve yet.
    serve(peers.running[-1])
    drama.act(0)
    drama.act(0)
    assert len(children.killed) == drama.num_killed == 1
    assert {peer.span for peer in peers.running} == {*peers.spans}


async def test_a_stage_that_has_lost_its_last_peer_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the trainer would wait for ever. A peer that is still starting counts, because it may serve in time."""
    monkeypatch.setattr(swarms, "LOOK_SECONDS", 0.01)
    swarm, children = _swarm(tmp_path)
    for stage in (0, 1, 2, 1):
        serve(swarm.peers.start(swarm.peers.spans[stage]))
    swarm.peers.start(swarm.peers.spans[1])
    trainer = swarm.start_trainer()
    names = [peer.child.name for peer in swarm.peers.running if peer.span == swarm.peers.spans[1]]
    reason = "swarm-peer: error: no memory"
    with LiveTable() as table, MetricsLog(swarm.output.metrics) as metrics:
        watching = asyncio.create_task(swarm.watch(trainer, table, metrics))
        for name in names[:-1]:
            children.ended.append(Exit(name=name, returncode=1, reason=reason))
            await asyncio.sleep(0.1)
            assert not watching.done()
        children.ended.append(Exit(name=names[-1], returncode=1, reason=reason))
        expected = f"^stage 1 has no peer left: {names[-1]} ended by itself: no memory; its log is .*{names[-1]}.log$"
        with pytest.raises(PeerUnavailable, match=expected):
            await asyncio.wait_for(watching, 10.0)


async def test_a_path_that_has_lost_its_last_peer_stands_still_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarms, "LOOK_SECONDS", 0.01)
    options, peers, children = started_peers(tmp_path, configs.load_preset("shared-value"))
    swarm = LocalSwarm(options, "shared", peers, children, generate())
    for span in peers.spans:
        serve(peers.start(span))
    trainer = swarm.start_trainer()

    def end(number: int) -> None:
        children.ended.append(Exit(name=f"peer-{number}", returncode=1, reason="swarm-peer: error: no memory"))

    def told() -> str:
        return swarm.output.metrics.read_text()

    with LiveTable() as table, MetricsLog(swarm.output.metrics) as metrics:
        watching = asyncio.create_task(swarm.watch(trainer, table, metrics))
        end(4)
        await eventually(lambda: "path 3 stands still, and others go on: stage 2.3 has no peer left: peer-4" in told())
        end(2)
        end(3)
        await eventually(lambda: "paths 1, 2, 3 stand still" in told())
        assert not watching.done()
        end(1)
        with pytest.raises(PeerUnavailable, match=r"^stage 2 has no peer left: peer-1 ended by itself: no memory"):
            await asyncio.wait_for(watching, 10.0)


def test_in_the_synchronous_setting_every_path_waits_for_each(tmp_path: Path) -> None:
    config = configs.load_preset("shared-value")
    config = dataclasses.replace(config, rounds=dataclasses.replace(config.rounds, setting="synchronous"))
    _, peers, _ = started_peers(tmp_path, config)
    for span in peers.spans:
        peers.start(span)
    assert peers.still_paths() == ([], True)
    peers.ended("peer-4")
    assert peers.still_paths() == ([3], False)
