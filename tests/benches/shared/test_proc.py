"""What is read of processes: CPU time, memory, children and bytes."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from scripts.benches.shared import proc

MIB = 1 << 20
TICKS = os.sysconf("SC_CLK_TCK")
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
        assert 0.5 <= proc.cpu_seconds_of_all(process.pid) < 3.0
        # Without its children, the process has only taken what it needs to start.
        assert proc.cpu_seconds(process.pid) <= proc.cpu_seconds_of_all(process.pid) - 0.5
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_memory_is_read_and_a_peak_forgotten() -> None:
    proc.forget_peak()
    before_bytes = proc.resident_bytes()
    held = torch.ones(64 * MIB // 4)
    assert proc.resident_bytes() - before_bytes > 60 * MIB
    del held
    assert proc.resident_bytes() - before_bytes < 30 * MIB
    assert proc.peak_bytes() - before_bytes > 60 * MIB
    proc.forget_peak()
    assert proc.peak_bytes() - before_bytes < 30 * MIB


@pytest.mark.parametrize(("own_seconds", "share"), [(60.0, 0.0), (55.0, 0.05), (20.0, 0.4), (61.0, 0.0)])
def test_what_this_process_did_not_use_is_the_others(
    own_seconds: float, share: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There are two cores for 50 seconds. They were idle for 40 core seconds in all."""
    ticks, own = iter([(100.0, 700.0), (140.0, 800.0)]), iter([5.0, 5.0 + own_seconds])
    monkeypatch.setattr(proc, "idle_and_all_ticks", lambda: tuple(TICKS * seconds for seconds in next(ticks)))
    monkeypatch.setattr(proc, "cpu_seconds_of_all", lambda pid: next(own))
    assert proc.Company().share() == pytest.approx(share)
    assert ("of this machine's cores meanwhile" in capsys.readouterr().err) == (share > proc.SAY_ABOVE)
