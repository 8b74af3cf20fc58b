"""Sides that take turns: who comes first, what their ratio is, and how long the bench waits for them."""

import sys
from pathlib import Path

import pytest

from peers.local.supervisor import Supervisor
from scripts.benches.shared import common, paired
from scripts.benches.shared.paired import Ratio, Worker, figures, in_turns, ratio
from swarm.errors import DeadlineExceeded, PeerUnavailable


def test_every_second_repetition_is_the_other_way_round() -> None:
    order: list[tuple[str, int]] = []

    def side(name: str, value: float) -> float:
        order.append((name, len(order)))
        return value

    turns = in_turns({"a": lambda number: side("a", number), "b": lambda number: side("b", -number)}, 3)
    assert [name for name, _ in order] == ["a", "b", "b", "a", "a", "b"]
    assert turns == {"a": [0, 1, 2], "b": [0, -1, -2]}


def test_a_slow_minute_that_hits_both_sides_changes_nothing() -> None:
    one = ratio([10.0, 2.0, 10.0, 12.0], [5.0, 1.0, 5.0, 4.0])
    assert one == Ratio(median=2.0, extremes=(2.0, 3.0))
    assert figures({"to_limit": {"384": one}, "to_others": one}) == {
        "to_limit": {"384": 2.0}, "to_others": 2.0,
        "ratio_range": {"to_limit": {"384": [2.0, 3.0]}, "to_others": [2.0, 3.0]},
    }  # fmt: skip


PROGRAM = """
import sys, time
from pathlib import Path
from scripts.benches.shared.paired import take_turns
results = Path(sys.argv[1])
take_turns(results, lambda: {work})
"""


def _worker(work: str, folder: Path, children: Supervisor) -> Worker:
    """A process that does this in each of its turns; it waits for the first."""
    results = folder / "results"
    worker = Worker("worker", [sys.executable, "-c", PROGRAM.format(work=work), str(results)], results, children)
    worker.until_stopped()
    return worker


@pytest.mark.slow
def test_a_turn_may_take_longer_than_a_start_and_a_process_that_ends_or_never_waits_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Supervisor(tmp_path) as children:
        worker = _worker("time.sleep(0.5) if not list(results.iterdir()) else sys.exit('no luck')", tmp_path, children)
        # A start may take as long as wait_for_json waits by default.
        defaults = common.wait_for_json.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "timeout_seconds", 0.1)
        worker.begin()
        assert 0.5 <= worker.seconds() < 60
        worker.begin()
        with pytest.raises(PeerUnavailable, match="worker ended early: no luck"):
            worker.seconds()
        monkeypatch.setattr(paired, "START_SECONDS", 0.0)
        with pytest.raises(DeadlineExceeded, match="idle is not ready"):
            Worker("idle", ["sleep", "60"], tmp_path / "idle", children).until_stopped()
