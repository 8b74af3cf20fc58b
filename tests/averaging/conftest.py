"""For tests with real servers and threads, in which nothing but averaging runs on the event loop."""

from collections.abc import Iterator

import pytest

from tests.support.loop_guard import guarded_loops


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make segments so small that the vectors of these tests are snapshots of several segments."""
    monkeypatch.setattr("swarm.averaging.donor.SEGMENT_BYTES", 64)


@pytest.fixture
def guarded() -> Iterator[None]:
    """Fails if the event loop is held, or touches a large tensor; see tests/support/loop_guard."""
    with guarded_loops():
        yield
