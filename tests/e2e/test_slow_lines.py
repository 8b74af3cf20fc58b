"""Joining over slow lines, between network namespaces: what bench joining measures, with what must hold."""

from pathlib import Path

import pytest

from scripts.benches import joining
from scripts.benches.shared.internet import missing

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing() or "everything is there"),
]


@pytest.fixture(autouse=True)
def own_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers import the bench's stages."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")


def test_four_that_join_at_once_through_a_slow_line_all_serve_and_training_goes_on(tmp_path: Path) -> None:
    figures = joining.run(joining.Options(before_seconds=20.0, folder=tmp_path))
    assert None not in figures["serves_seconds"], figures
    assert figures["slowdown"] < 3.0, figures
    assert figures["num_silent"] == 0, figures
    assert figures["proven"], figures


def test_a_joiner_whose_line_is_too_slow_says_so_and_slows_nobody(tmp_path: Path) -> None:
    """Replaying a round takes it longer than the group takes to commit one."""
    figures = joining.run(
        joining.Options(
            joiners=1, joiner_megabits=1.0, megabits=1000.0, parameters=200_000, round_samples=32,
            before_seconds=15.0, limit_seconds=240.0, folder=tmp_path,
        )
    )  # fmt: skip
    (said,) = figures["said"].values()
    assert any("falling back" in line and "never arrive" in line for line in said), said
    assert sum("installed the snapshot" in line for line in said) >= 2, said
    assert figures["slowdown"] < 2.0, figures
    assert figures["proven"], figures
