"""A program that is told to stop, exit codes, and one-line errors."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from peers.shared import stopping
from peers.shared.stopping import FAREWELL_SECONDS, stop_or_expiry
from swarm.credentials.identity import generate
from swarm.errors import PeerUnavailable
from tests.support import locked
from tests.support.chain import PATIENCE_SECONDS, eventually
from tests.support.manual_clock import ManualClock


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_program_that_is_told_to_stop_knows_with_which_code(number: signal.Signals) -> None:
    stop = stopping.stop_event()
    try:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), PATIENCE_SECONDS)
        assert stop.exit_code == 128 + number
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)


async def test_a_program_leaves_before_its_token_ends(caplog: pytest.LogCaptureFixture) -> None:
    stop, clock = asyncio.Event(), ManualClock(locked.PEER_TOKEN.expires_at - FAREWELL_SECONDS - 0.05)
    leaving = asyncio.create_task(stop_or_expiry(stop, locked.PEER, clock))
    await asyncio.sleep(0)
    assert not stop.is_set()
    await eventually(leaving.done, meanwhile=lambda: clock.advance(0.1))
    assert stop.is_set()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "leaving; ask the run's owner for a new one" in caplog.text
    stop.set()
    for identity in (locked.PEER, locked.OPEN):
        async with asyncio.timeout(5):
            await stop_or_expiry(stop, identity, ManualClock(locked.NOW.timestamp()))
    assert len(caplog.records) == 1


async def test_a_program_leaves_when_its_token_is_revoked(caplog: pytest.LogCaptureFixture) -> None:
    stop, token, clock = asyncio.Event(), locked.issue(), ManualClock(locked.NOW.timestamp())
    own = token.admit(generate())
    leaving = asyncio.create_task(stop_or_expiry(stop, own, clock))
    await asyncio.sleep(0)
    assert own.authority is not None
    own.authority.revoke([locked.PEER_TOKEN.token_id, token.token_id])
    await eventually(leaving.done, meanwhile=lambda: clock.advance(0.1))
    assert stop.is_set()
    assert caplog.messages == [
        f"the run's owner has revoked the token 'test' of {own.peer_id[:8]}: leaving; ask the run's owner for a new one"
    ]


def test_second_ctrl_c_exits_at_once() -> None:
    program = (
        "import asyncio, os, signal; from peers.shared.stopping import stop_event\n"
        "async def main():\n"
        "    stop = stop_event()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    await stop.wait()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 130


async def test_what_is_done_beside_a_block_ends_with_it_and_ends_it_with_an_error() -> None:
    ended = list[str]()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async def fail() -> None:
        raise PeerUnavailable("gone")

    async with stopping.beside(wait()):
        await asyncio.sleep(0)
    assert ended == ["work"]
    with pytest.raises(ExceptionGroup) as raised:
        async with stopping.beside(wait(), fail()):
            await asyncio.Event().wait()
    assert list(map(str, stopping.leaves(raised.value))) == ["gone"]
    assert ended == ["work", "work"]


# -- exit codes --------------------------------------------------------------------------------------------------------


_MORE_MEMORY = (
    "close other programs, take a machine with more memory, or in training a smaller data.microbatch_size or "
    "data.sequence_length, model.gradient_checkpointing = true"
)


def _follows(error: Exception, cause: Exception) -> Exception:
    error.__context__ = cause
    return error


def _raise(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (ValueError("--steps must be\nat least 1"), 2, "swarm-x: error: --steps must be at least 1"),
        (OSError(28, "No space left on device", "/x/log"), 1, "swarm-x: error: /x/log: No space left on device"),
        (KeyboardInterrupt(), 130, "swarm-x: interrupted"),
        (stopping.Terminated(), 143, "swarm-x: terminated"),
        (PeerUnavailable("a\x1b[2J\x9bm\tpeer"), 1, "swarm-x: error: a [2J m peer"),
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
    ],
)
def test_a_fault_is_one_line(
    error: BaseException, exit_code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stopping.run_program("swarm-x", lambda: _raise(error)) == exit_code
    assert capsys.readouterr().err == line + "\n"


@pytest.mark.parametrize("error", [KeyError("x"), ExceptionGroup("", [ValueError("y"), TypeError("z")])])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    """That holds, too, if faults that followed from the bug share its group."""
    with pytest.raises(type(error)):
        stopping.run_program("swarm-x", lambda: _raise(error))
