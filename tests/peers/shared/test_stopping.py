"""A program that is told to stop."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from peers.shared import stopping
from tests.support.chain import PATIENCE_SECONDS


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
