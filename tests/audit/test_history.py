"""Logs that are torn, broken, incomplete, or of another run."""

import re
from pathlib import Path

import pytest

from swarm.audit.audit import audit
from swarm.events import Gap
from tests.audit.honest import edit, edit_first, honest_run, one_violation


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    before = audit(run.files)
    with (tmp_path / "peer-0a.jsonl").open("a") as file:
        file.write('{"event":"accumulate","ti')
    assert audit(run.files) == before


def test_a_file_with_nothing_but_a_torn_line_says_nothing(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    (tmp_path / "killed.jsonl").write_text('{"event":"sta')
    (tmp_path / "killed-sooner.jsonl").touch()
    assert audit(run.files).proven


def test_a_gap_leaves_the_run_unproven(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    run.write("peer-0a", Gap(lost=12))
    assert "peer-0a.jsonl" in one_violation(audit(run.files), "12 events were not written")


def test_a_broken_middle_is_named(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    path = tmp_path / "peer-0a.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for broken in (
        "[" * 100_000 + "\n",
        "1" * 5000 + "\n",
        "[1, 2]\n",
        "{\n",
        lines[4].replace("event", "tneve"),
        lines[4].replace('"samples":2', '"samples":"x"'),
        *(re.sub(r'"monotonic":[0-9.]+', f'"monotonic":{at}', lines[4]) for at in ("null", "[]", "1" * 400)),
    ):
        path.write_text("".join([*lines[:4], broken, *lines[5:]]))
        with pytest.raises(ValueError, match=r"peer-0a.jsonl: line 5 is no event .*") as error:
            audit(run.files)
        assert "\n" not in str(error.value)


def test_what_only_a_newer_release_knows_is_named(tmp_path: Path) -> None:
    """New keys of known events are passed over."""
    run = honest_run(tmp_path)
    before = audit(run.files)
    edit(tmp_path / "peer-0a.jsonl", lambda lines: [line | {"mood": "good"} for line in lines])
    assert audit(run.files) == before
    edit(tmp_path / "peer-0a.jsonl", lambda lines: [*lines[:4], lines[4] | {"event": "omen"}, *lines[5:]])
    with pytest.raises(ValueError, match=r"line 5 is no event \(no key or kind 'omen'; what a newer release wrote is"):
        audit(run.files)


def test_a_file_without_a_start_is_named(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    edit(tmp_path / "peer-1a.jsonl", lambda lines: lines[1:])
    with pytest.raises(ValueError, match=r"peer-1a.jsonl: no start before line 1"):
        audit(run.files)


def test_a_file_of_another_run_is_named(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    edit(tmp_path / "peer-1a.jsonl", lambda lines: lines[0].update(run="run.2") or lines)
    with pytest.raises(ValueError, match=r"peer-1a.jsonl is of run run.2, and .*peer-0a.jsonl of run run.1"):
        audit(run.files)


@pytest.mark.parametrize(
    ("event", "forged"),
    [
        ("start", {"num_stages": 0}),
        ("start", {"num_stages": 1 << 60}),
        ("start", {"num_fragments": 0}),
        ("start", {"num_fragments": 1 << 60}),
        ("start", {"paths": [[0]]}),
        ("start", {"stage": 7}),
        ("close", {"fragment": 1}),
        ("close", {"fragment": -1}),
        ("accumulate", {"block": "7"}),
    ],
)
def test_a_line_about_what_no_run_has_is_named(event: str, forged: dict[str, object], tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    changed = edit_first(tmp_path / "peer-1a.jsonl", event, forged)
    with pytest.raises(ValueError, match=rf"peer-1a.jsonl: line {changed} is about a stage or a fragment that the run"):
        audit(run.files)


@pytest.mark.parametrize("forged", [{"num_stages": 3}, {"num_fragments": 2}, {"paths": [[0, 0], [0, 1]]}])
def test_files_that_disagree_about_the_run_are_named(forged: dict[str, object], tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    edit_first(tmp_path / "peer-1a.jsonl", "start", forged)
    with pytest.raises(ValueError, match=r"peer-1a.jsonl and .*peer-0a.jsonl tell different things about run run.1"):
        audit(run.files)


def test_a_round_of_endless_size_is_named_at_once(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    edit_first(tmp_path / "peer-1a.jsonl", "commit", {"next_microbatch": 1 << 60})
    assert any("is said to have more than" in line for line in audit(run.files).findings.violations)


def test_a_commit_in_a_trainers_log_is_named(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    lines = (tmp_path / "peer-0a.jsonl").read_text().splitlines(keepends=True)
    commit = next(line for line in lines if '"commit"' in line)
    with (tmp_path / "trainer.jsonl").open("a") as file:
        file.write(commit.replace('"block":"0",', ""))
    found = audit(run.files).findings.violations
    assert any(line.startswith("trainer") for line in found), found


def test_nothing_to_audit(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="no events"):
        audit([tmp_path / "empty.jsonl"])
