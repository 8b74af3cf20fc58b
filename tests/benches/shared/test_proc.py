"""What is read of processes: CPU time, memory, children and bytes."""

import os

import pytest
import torch

from scripts.benches.shared import proc

MIB = 1 << 20
TICKS = os.sysconf("SC_CLK_TCK")


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
