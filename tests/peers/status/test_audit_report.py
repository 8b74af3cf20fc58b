"""swarm-status --audit, from its command line to its exit code."""

import json
from pathlib import Path

import pytest

from peers.shared import faults
from peers.shared.process import EXIT_FAILURE, EXIT_USAGE
from peers.status import program as status
from tests.audit.honest import HonestRun, edit


def test_a_proven_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = HonestRun(tmp_path)
    run.round(0)
    assert status.main(["--audit", *map(str, run.files)]) == 0
    out = capsys.readouterr().out
    assert "rounds_committed" in out
    assert out.splitlines()[-1] == "proven"


def test_a_refuted_run_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = HonestRun(tmp_path)
    run.round(0)
    edit(tmp_path / "peer-1b.jsonl", lambda lines: [line for line in lines if line.get("microbatch") != 3])
    arguments = ["--json", "--audit", *map(str, run.files)]
    assert status.main(arguments) == 1
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report["missing"] == 1
    assert not report["proven"]
    assert report["violations"]
    names = {"duplicates", "missing", "replayed", "rolled_back", "lost_share", "rounds_committed", "rounds_aborted"}
    assert names | {"digests_compared", "digests_differing"} <= report.keys()
    assert status.main(["--audit", *map(str, run.files)]) == 1
    out = capsys.readouterr().out
    assert "stage 1, round 0, microbatch 3: missing in a committed round" in out


def test_a_missing_trainers_file_is_no_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = HonestRun(tmp_path, "diloco")
    run.round(0)
    files = [str(path) for path in run.files if path.name != "trainer.jsonl"]
    assert status.main(["--audit", *files]) == EXIT_FAILURE
    assert capsys.readouterr().out.splitlines()[-1] == "refuted: 1 violation"


def test_what_is_no_event_log_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text("what?\n")
    arguments = ["--audit", str(tmp_path / "x.jsonl")]
    assert faults.run_program("swarm-status", lambda: status.main(arguments)) == EXIT_USAGE
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert faults.run_program("swarm-status", lambda: status.main(["--audit", str(tmp_path / "none")])) == 1
    assert "none: No such file or directory" in capsys.readouterr().err


def test_an_audit_and_a_swarm_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        status.main(["--audit", "x", "--initial-peers", "y"])
    assert "goes with no INVITE" in capsys.readouterr().err
