"""A program's log: one line a record."""

import logging
import sys
import threading

import pytest

from peers.shared import logs
from swarm.machine.words import about


def _raise(error: BaseException) -> int:
    raise error


def test_a_log_record_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging("50%peer", "info")
    try:
        raise TypeError("odd")
    except TypeError:
        logging.getLogger("swarm").exception("it\nfailed")
    logging.getLogger("swarm").debug("not shown")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("50%peer ERROR: it failed (TypeError: odd)")


def test_a_line_begins_with_what_its_task_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging("peer-1", "info")
    with about("stage 2: "):
        logging.getLogger("swarm").info("round %d", 3)
    logging.getLogger("swarm").info("none")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("peer-1 INFO: stage 2: round 3")
    assert second.endswith("peer-1 INFO: none")


def test_strangers_text_in_a_log_is_no_command_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging("peer-1", "info")
    logging.getLogger("swarm").error("refused: %s", "a\x1b[2J\x9bm\x07 \u00fc\U0001f600")
    assert capsys.readouterr().err.endswith("ERROR: refused: a [2J m  \u00fc\U0001f600\n")


def test_a_thread_that_no_bug_ends_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    logs.setup_logging("peer-1", "info")

    def end(error: Exception) -> str:
        thread = threading.Thread(target=_raise, args=[error])
        thread.start()
        thread.join()
        return capsys.readouterr().err

    (line,) = end(MemoryError()).splitlines()
    assert "peer-1 ERROR: out of memory: no room for what was needed" in line
    (line,) = end(OSError(28, "No space left on device")).splitlines()
    assert line.endswith("peer-1 ERROR: something in the background has ended (No space left on device)")
    assert "Traceback" in end(KeyError("a bug")), "which is to be found"
