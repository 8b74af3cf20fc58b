"""Event logs: what is on disk after writes and full disks."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from swarm.events import Accumulate, Ack, EventLog, Grant, Leave
from tests.support.full_disk import FullDisk
from tests.support.manual_clock import ManualClock


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_an_event_is_a_line(path: Path) -> None:
    clock = ManualClock(start=12.5)
    log = EventLog(path, clock)
    log.write(Accumulate(microbatch=3, samples=4, bucket=0))
    clock.advance(1.0)
    log.write(Grant(microbatches=(1, 2), trainer='"quoted"'))
    log.write(Leave())
    assert lines(path) == [
        {"event": "accumulate", "time": 12.5, "monotonic": 12.5, "microbatch": 3, "samples": 4, "bucket": 0},
        {"event": "grant", "time": 13.5, "monotonic": 13.5, "microbatches": [1, 2], "trainer": '"quoted"'},
        {"event": "leave", "time": 13.5, "monotonic": 13.5},
    ]


def test_a_full_disk_is_one_line_in_the_log_and_a_gap_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch, room=120)
    log = EventLog(path, ManualClock())
    for index in range(5):
        log.write(Ack(microbatch=index))
    assert len(caplog.records) == 1
    assert f"events are not written to {path}: the disk is full" in caplog.text
    disk.room = 10_000
    log.write(Ack(microbatch=5))
    log.write(Ack(microbatch=6))
    first, torn, gap, *others = path.read_text().splitlines()
    assert json.loads(first)["microbatch"] == 0
    assert not torn.endswith("}")
    assert json.loads(gap)["event"] == "gap"
    assert json.loads(gap)["lost"] == 4
    assert [json.loads(line)["microbatch"] for line in others] == [5, 6]


def test_threads_do_not_mix_their_lines(path: Path) -> None:
    log = EventLog(path, ManualClock())

    def work() -> None:
        for index in range(200):
            log.write(Ack(microbatch=index))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["microbatch"] for line in lines(path)) == sorted(4 * list(range(200)))
