"""Exit codes, one-line errors, logging, and death with the parent."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from peers.shared import process
from swarm.errors import ConfigMismatch, PeerUnavailable
from tests.support.processes import wait_until_gone


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:], root.level = handlers, level


_MORE_MEMORY = "close other programs, or take a machine with more memory"


def _follows(error: Exception, cause: Exception) -> Exception:
    error.__context__ = cause
    return error


def _raise(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (ValueError("--steps must be\nat least 1"), 2, "swarm-x: error: --steps must be at least 1"),
        (ConfigMismatch("run is 'a' here"), 1, "swarm-x: error: run is 'a' here"),
        (OSError(28, "No space left on device", "/x/log"), 1, "swarm-x: error: /x/log: No space left on device"),
        (
            OSError(17, "File exists", "/x"),
            1,
            "swarm-x: error: /x: it should be a folder, and is a file or in a file; name another path",
        ),
        (KeyboardInterrupt(), 130, "swarm-x: interrupted"),
        (process.Terminated(), 143, "swarm-x: terminated"),
        (PeerUnavailable("a\x1b[2J\x9bm\tpeer"), 1, "swarm-x: error: a [2J m peer"),
        (ExceptionGroup("", [ExceptionGroup("", [PeerUnavailable("no answer")])]), 1, "swarm-x: error: no answer"),
        (MemoryError(), 1, f"swarm-x: error: out of memory: no room for what was needed; {_MORE_MEMORY}"),
        (
            ExceptionGroup("", [PeerUnavailable("no answer"), RuntimeError("can't start new thread")]),
            1,
            f"swarm-x: error: out of memory: no room for another thread; {_MORE_MEMORY}",
        ),
        (
            _follows(KeyError("x"), MemoryError()),
            1,
            f"swarm-x: error: out of memory: no room for what was needed; {_MORE_MEMORY}",
        ),
        (_follows(PeerUnavailable("no answer"), MemoryError()), 1, "swarm-x: error: no answer"),
    ],
)
def test_a_fault_is_one_line(
    error: BaseException, exit_code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert process.run_program("swarm-x", lambda: _raise(error)) == exit_code
    assert capsys.readouterr().err == line + "\n"


def test_a_result_is_the_exit_code() -> None:
    assert process.run_program("swarm-x", lambda: 3) == 3


@pytest.mark.parametrize("error", [KeyError("x"), ExceptionGroup("", [ValueError("y"), TypeError("z")])])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    """That holds, too, if faults that followed from the bug share its group."""
    with pytest.raises(type(error)):
        process.run_program("swarm-x", lambda: _raise(error))


def test_debug_shows_where(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    process.setup_logging("peer-1", "debug")
    process.run_program("swarm-x", lambda: _raise(ValueError("bad")))
    assert "Traceback" in capsys.readouterr().err


def test_a_log_record_is_one_line(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    process.setup_logging("50%peer", "info")
    try:
        raise TypeError("odd")
    except TypeError:
        logging.getLogger("swarm").exception("it\nfailed")
    logging.getLogger("swarm").debug("not shown")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("50%peer ERROR: it failed (TypeError: odd)")


def test_strangers_text_in_a_log_is_no_command_to_a_terminal(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    process.setup_logging("peer-1", "info")
    logging.getLogger("swarm").error("refused: %s", "a\x1b[2J\x9bm\x07 \u00fc\U0001f600")
    assert capsys.readouterr().err.endswith("ERROR: refused: a [2J m  \u00fc\U0001f600\n")


def test_environment_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    process.prepare_environment()
    assert os.environ["GRPC_VERBOSITY"] == "DEBUG"
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "0"


_FAULTS_OF_THIRD_TURN = """
import resource, threading
from peers.shared import process

process.keep_freed_memory()

def turn():
    # Like a microbatch's gradients and a round's vector of them: there at the same time, then all freed.
    kept = [bytearray(size) for size in [8_000_000] * 16 + [128_000_000]]

def turns():
    global faults
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        turn()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

thread = threading.Thread(target=turns)
thread.start()
thread.join()
print(faults)
"""


def test_what_a_microbatch_leaves_is_there_for_the_next_one_unless_the_user_says_otherwise() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def faults(settings: dict[str, str]) -> int:
        command = [sys.executable, "-c", _FAULTS_OF_THIRD_TURN]
        return int(subprocess.run(command, env=environment | settings, capture_output=True, check=True).stdout)

    num_pages = 2 * 16 * 8_000_000 // 4096
    assert faults({}) < num_pages / 10
    assert faults({"MALLOC_TRIM_THRESHOLD_": "131072"}) > num_pages / 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_program_that_is_told_to_stop_knows_with_which_code(number: signal.Signals) -> None:
    stop = process.stop_event()
    try:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), timeout=5)
        assert stop.exit_code == 128 + number
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)


def test_second_ctrl_c_exits_at_once() -> None:
    program = (
        "import asyncio, os, signal; from peers.shared.process import stop_event\n"
        "async def main():\n"
        "    stop = stop_event()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    await stop.wait()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 130


def test_child_dies_with_its_parent() -> None:
    program = (
        "import subprocess; from peers.shared.process import die_with_parent\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=die_with_parent(), start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "input()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    wait_until_gone(child)


def test_a_thread_that_ends_for_want_of_memory_is_one_line(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    process.setup_logging("peer-1", "info")

    def end(error: Exception) -> str:
        thread = threading.Thread(target=_raise, args=[error])
        thread.start()
        thread.join()
        return capsys.readouterr().err

    (line,) = end(MemoryError()).splitlines()
    assert "peer-1 ERROR: out of memory: no room for what was needed" in line
    assert "Traceback" in end(KeyError("a bug")), "which is to be found"
