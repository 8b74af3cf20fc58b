"""How busy the machine was with other processes."""

import os

import pytest

from scripts.benches.shared import proc
from scripts.benches.shared.company import Company

TICKS = os.sysconf("SC_CLK_TCK")


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
    assert Company().share() == pytest.approx(share)
    assert ("of this machine's cores meanwhile" in capsys.readouterr().err) == is_said


def test_a_system_that_does_not_tell_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def ticks() -> tuple[float, float]:
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(proc, "idle_and_all_ticks", ticks)
    assert Company().share() is None


def test_this_machine_has_a_share() -> None:
    present = Company()
    sum(range(3_000_000))
    share = present.share()
    assert share is None or 0.0 <= share <= 1.0
