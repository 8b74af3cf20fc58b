"""A program's log: one line a record."""

import logging

import pytest

from peers.shared import logs


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


def test_strangers_text_in_a_log_is_no_command_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging("peer-1", "info")
    logging.getLogger("swarm").error("refused: %s", "a\x1b[2J\x9bm\x07 \u00fc\U0001f600")
    assert capsys.readouterr().err.endswith("ERROR: refused: a [2J m  \u00fc\U0001f600\n")
