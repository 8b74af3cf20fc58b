"""A folder of texts, and a place for what is prepared of it."""

from pathlib import Path

import pytest

from tests.data.texts import NUM_FILES, text_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for number in range(NUM_FILES):
        path = root / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(number))
    return root


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"
