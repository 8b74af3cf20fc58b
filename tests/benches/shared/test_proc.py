"""What is read of processes: CPU time, memory, children and bytes."""

import os
import signal
import socket
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


def test_children_have_names_until_they_are_waited_for() -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        # The process has its name once it answers.
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"hello\n"
        assert proc.children(os.getpid())[process.pid] == "cat"
        assert not proc.is_zombie(process.pid)
        assert proc.status(process.pid)["Threads"] == "1"
        assert proc.num_descriptors(process.pid) >= 3
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert proc.is_zombie(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert process.pid not in proc.children(os.getpid())
    assert proc.children(process.pid) == {}
    with pytest.raises(OSError, match="No such file"):
        proc.cpu_seconds(process.pid)


def test_bytes_that_are_sent_are_counted() -> None:
    before, written = proc.loopback_bytes(), proc.written_bytes(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            # This is no more than the connection's buffers take.
            os.write(sender.fileno(), bytes(10_000))
            assert len(receiver.recv(10_000, socket.MSG_WAITALL)) == 10_000
    assert proc.loopback_bytes() - before >= 10_000
    assert proc.written_bytes(os.getpid()) - written >= 10_000


def test_cores_are_idle_for_a_part_of_the_time() -> None:
    idle, everything = proc.idle_and_all_ticks()
    assert 0 <= idle <= everything


@pytest.mark.parametrize(
    ("own_seconds", "share", "is_said"),
    [(60.0, 0.0, False), (55.0, 0.05, False), (20.0, 0.4, True), (61.0, 0.0, False)],
)
def test_what_this_process_did_not_use_is_the_others(
    own_seconds: float, share: float, is_said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There are two cores for 50 seconds. They were idle for 40 core seconds in all."""
    seen = iter([(100.0, 700.0, 5.0), (140.0, 800.0, 5.0 + own_seconds)])
    now = (0.0, 0.0, 0.0)

    def ticks() -> tuple[float, float]:
        nonlocal now
        now = next(seen)
        return now[0] * TICKS, now[1] * TICKS

    monkeypatch.setattr(proc, "idle_and_all_ticks", ticks)
    monkeypatch.setattr(proc, "cpu_seconds_of_all", lambda pid: now[2])
    assert proc.Company().share() == pytest.approx(share)
    assert ("of this machine's cores meanwhile" in capsys.readouterr().err) == is_said


def test_a_system_that_does_not_tell_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def ticks() -> tuple[float, float]:
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(proc, "idle_and_all_ticks", ticks)
    assert proc.Company().share() is None


def test_this_machine_has_a_share() -> None:
    present = proc.Company()
    sum(range(3_000_000))
    share = present.share()
    assert share is None or 0.0 <= share <= 1.0
