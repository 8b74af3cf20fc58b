"""Fixtures for all tests with real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.local.supervisor import Supervisor


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Supervisor]:
    """Starts processes, and ends whatever is left of them."""
    with Supervisor(tmp_path / "logs", grace_seconds=0.0) as children:
        yield children
