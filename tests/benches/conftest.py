"""A text of their own for tests of benches that train."""

from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} bottles\n" for number in range(3000)))
    return str(path)
