"""Whose CPU time counts when a command's start is measured, and what it is compared with."""

import os
import signal
import subprocess
import sys

from scripts.benches.startup import _over_import, cpu_seconds_of

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


def test_cpu_seconds_are_over_what_a_command_has_to_import() -> None:
    found = _over_import({
        "import_torch_cpu_seconds": [2.0, 4.0], "import_hivemind_cpu_seconds": [3.0, 6.0],
        "import_trainer_cpu_seconds": [3.0, 6.0], "status_cpu_seconds": [1.0, 1.0], "status_seconds": [9.0, 9.0],
        "status_dht_cpu_seconds": [6.0, 12.0],
    })  # fmt: skip
    assert {name: ratio.median for name, ratio in found.items()} == {
        "import_trainer": 1.5, "status": 0.375, "status_dht": 2.0,
    }  # fmt: skip
