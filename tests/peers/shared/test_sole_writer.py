"""One process at a time may write to an event log or an output folder. When it ends, the next one may at once."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peers.local import program as local
from peers.shared import event_file, sole_writer
from peers.shared.sole_writer import ClaimedIdentity, require_sole_writer
from peers.trainer import program as trainer
from swarm.errors import IntegrityError
from swarm.machine.clock import SystemClock

ROOT = Path(__file__).parents[3]
HOLDER = """
import subprocess, sys
from pathlib import Path
from peers.shared import event_file
from peers.shared.sole_writer import require_sole_writer
from swarm.machine.clock import SystemClock
folder = Path(sys.argv[1])
require_sole_writer(folder, "--output")
events = event_file.open_events(folder / "events" / "x.jsonl", SystemClock())
print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is locked by a process that has a child."""
    return tmp_path / "out"


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def _refused(folder: Path) -> None:
    for path, given_as in ((folder, "--output x"), (folder / "events" / "x.jsonl", "--events y")):
        with pytest.raises(ValueError, match=f"^{given_as} is in use by another process on this machine: give each"):
            require_sole_writer(path, given_as)


def test_a_second_process_is_refused_until_the_first_is_gone(folder: Path, holder: subprocess.Popen[str]) -> None:
    """The first process was killed, and a child of it is still alive. Only the event log is left in the folder."""
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        _refused(folder)
        with pytest.raises(ValueError, match=r"^--events .*x\.jsonl is in use by another process"):
            event_file.open_events(folder / "events" / "x.jsonl", SystemClock())
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        for path in (folder, folder / "events" / "x.jsonl"):
            os.close(require_sole_writer(path, ""))
    finally:
        holder.kill()
        os.kill(child, 9)
    assert [path.name for path in folder.rglob("*")] == ["events", "x.jsonl"]


@pytest.fixture
def _own_logging() -> Iterator[None]:
    """Restore the root logger, which programs set up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    root.handlers[:], root.level = handlers, level


@pytest.mark.usefixtures("_own_logging")
def test_trainers_and_launchers_refuse_before_they_begin(tmp_path: Path) -> None:
    """A trainer shares its folder with the launcher that started it."""
    output = tmp_path / "out"
    (output / "logs").mkdir(parents=True)
    programs = {"swarm-local": (local.main, []), "swarm-trainer": (trainer.main, ["--initial-peers", "x"])}
    for other, refused in ((output / "logs", ["swarm-local"]), (output, ["swarm-local", "swarm-trainer"])):
        held = require_sole_writer(other, "")
        for name in refused:
            main, arguments = programs[name]
            with pytest.raises(ValueError, match=f"^--output {output} is in use by another process"):
                main([*arguments, "--output", str(output)])
        os.close(held)


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    os.close(require_sole_writer(tmp_path, "--output x"))


Claim = Callable[[Path | None, Path, str], ClaimedIdentity]


@pytest.fixture
def claim() -> Iterator[Claim]:
    """A function that claims identities until the test is over."""
    claimed = []

    def claim(path: Path | None, folder: Path, label: str) -> ClaimedIdentity:
        claimed.append(sole_writer.claim_identity(path, folder, label))
        return claimed[-1]

    yield claim
    for one in claimed:
        one.lock.close()


def test_a_restarted_peer_keeps_its_identity(claim: Claim, tmp_path: Path) -> None:
    first = claim(None, tmp_path, "stage-1")
    first.lock.close()
    again = claim(None, tmp_path, "stage-1")
    assert again.identity == first.identity


def test_a_second_peer_of_the_stage_gets_its_own(claim: Claim, tmp_path: Path) -> None:
    first, second = claim(None, tmp_path, "stage-1"), claim(None, tmp_path, "stage-1")
    assert first.identity.peer_id != second.identity.peer_id
    first.lock.close()
    assert claim(None, tmp_path, "stage-1").identity == first.identity


def test_a_named_file_in_use_is_refused(claim: Claim, tmp_path: Path) -> None:
    path = tmp_path / "mine.pem"
    claimed = claim(path, tmp_path, "stage-0")
    with pytest.raises(ValueError, match="in use by another peer"):
        claim(path, tmp_path, "stage-0")
    claimed.lock.close()
    assert claim(path, tmp_path, "stage-0").identity == claimed.identity


def test_a_file_that_is_no_identity_is_refused_and_left_alone(claim: Claim, tmp_path: Path) -> None:
    path = tmp_path / "notes.pem"
    path.write_text("something else")
    with pytest.raises(IntegrityError, match=r"notes\.pem is not a peer's identity"):
        claim(path, tmp_path, "stage-0")
    assert path.read_text() == "something else"
