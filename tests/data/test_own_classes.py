"""Datasets whose rows a class of the user's own gives."""

import os
import sys
from pathlib import Path

import pytest

from swarm.config import DataConfig
from swarm.data import corpora
from tests.data.texts import config_of, decoded

SOURCE = """
import itertools

class Texts:
    def __iter__(self):
        yield "a string " * 9
        yield {"text": "a dict " * 9, "id": 7}
        yield 5
        yield from ({"text": f"row {number} " * 9} for number in range(40))

class Endless:
    def __iter__(self):
        return (f"text {number} " * 9 for number in itertools.count())

class Fails(Texts):
    def __iter__(self):
        yield "one"
        raise KeyError("no\\nsuch key")

class NotMade(Texts):
    def __init__(self):
        raise OSError("no disk")

number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "modules" / "own_rows.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    monkeypatch.delitem(sys.modules, "own_rows", raising=False)
    monkeypatch.syspath_prepend(path.parent)
    return path


@pytest.fixture
def config(own_module: Path) -> DataConfig:
    return config_of("class:own_rows:Texts")


def test_its_rows_are_dicts_or_strings(config: DataConfig, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = decoded(corpora.prepare(config, cache_dir=cache)).splitlines()
    assert lines[:2] == ["a string " * 9, "a dict " * 9]
    assert lines[2:] == [f"row {number} " * 9 for number in range(40)]
    assert "row 3: it is neither a dict nor a string" in caplog.text


def test_it_is_read_again_only_when_its_file_has_changed(config: DataConfig, own_module: Path, cache: Path) -> None:
    corpora.prepare(config, cache_dir=cache)
    files = set(cache.iterdir())
    corpora.prepare(config, cache_dir=cache)
    assert set(cache.iterdir()) == files
    os.utime(own_module, ns=(1, 1))
    corpora.prepare(config, cache_dir=cache)
    assert set(cache.iterdir()) > files


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("no_such_module:Texts", r"^data\.dataset 'no_such_module:Texts' cannot be imported \(No module named"),
        ("own_rows:Fails", r"fails after row 1: KeyError: 'no\\nsuch key'$"),
        ("own_rows:NotMade", "fails after row 0: OSError: no disk$"),
    ],
)
def test_what_it_does_wrong_is_one_line(name: str, fault: str, own_module: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match=fault) as raised:
        corpora.prepare(config_of(f"class:{name}"), cache_dir=cache)
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)
