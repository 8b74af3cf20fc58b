"""Whose CPU time counts when a command's start is measured."""

import os
import signal
import subprocess
import sys

from scripts.benches.startup import cpu_seconds_of

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
STAY = BURN + "print(flush=True)\ntime.sleep(60)\n"
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {BURN!r}])
subprocess.run([sys.executable, "-c", {STAY!r}])
"""


def test_children_that_live_and_that_have_ended_count() -> None:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        # 0.6 s, less what the kernel's counters cut off: each is in whole ticks of 10 ms.
        assert 0.5 <= cpu_seconds_of(process.pid) < 3.0
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
