"""Which process an event file belongs to."""

import dataclasses
from pathlib import Path

import pytest

from peers.shared.event_file import begin, open_events, start_of
from swarm import config as configs
from swarm.events import EventLog
from swarm.machine.clock import SystemClock

CONFIG = configs.load_preset("tiny")


def _begin(path: Path, config: configs.RunConfig) -> None:
    events = open_events(path, SystemClock())
    assert isinstance(events, EventLog)
    begin(events, path, start_of(config, peer_id="a" * 40, name="first", stage=0))


def test_a_restarted_process_goes_on_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"gap"}\n{"event":"sta\n')
    for _ in range(2):
        EventLog(path, SystemClock()).close()
        begin(EventLog(path, SystemClock()), path, start_of(CONFIG, peer_id="a" * 40, name="first", stage=0))
    assert path.read_text().count('"event":"start"') == 2


def test_another_runs_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    _begin(path, CONFIG)
    before = path.read_text()
    other = dataclasses.replace(CONFIG, run="other")
    with pytest.raises(ValueError, match=f"is of another run, {CONFIG.run_id}: give this one a file of its own"):
        begin(EventLog(path, SystemClock()), path, start_of(other, peer_id="a" * 40, name="first", stage=0))
    assert path.read_text() == before
