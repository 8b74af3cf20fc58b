"""Small datasets of text, and corpora of them."""

import itertools
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.config import DataConfig
from swarm.data import corpora
from swarm.data.parts import THREAD_NAME

NUM_FILES = 30


def config_of(dataset: Path | str, **changes: Any) -> DataConfig:
    settings: dict[str, Any] = {"sequence_length": 8, "microbatch_size": 2, "held_out_fraction": 0.1, **changes}
    return DataConfig(dataset=str(dataset), **settings)


def text_of(number: int) -> str:
    return f"File {number} says: " + f"{number} bees. " * (number + 5)


def decoded(corpus: corpora.Corpus) -> str:
    return corpus.sources[0].tokens.tobytes().decode()


class Rows:
    """Stands in for the `datasets` library."""

    def __init__(
        self, rows: list[dict[str, Any]], error: Exception | None = None, late_error: Exception | None = None
    ) -> None:
        self.rows = rows
        self.error = error
        self.late_error = late_error
        self.asked: list[tuple[Any, ...]] = []

    def load_dataset(self, name: str, config: str | None, *, split: str, streaming: bool) -> "Rows":
        self.asked.append((name, config, split, streaming))
        if self.error:
            raise self.error
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._all()

    def skip(self, n: int) -> Iterator[dict[str, Any]]:
        return itertools.islice(self, n, None)

    def _all(self) -> Iterator[dict[str, Any]]:
        yield from self.rows
        if self.late_error:
            raise self.late_error

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("datasets")
        vars(module)["load_dataset"] = self.load_dataset
        monkeypatch.setitem(sys.modules, "datasets", module)


def end_of_preparation() -> None:
    """Wait until no part of a dataset is prepared any more, which would reach beyond the test."""
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(30)


def assert_refused(config: DataConfig, cache: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        corpora.prepare(config, cache_dir=cache)
    assert config.datasets[0] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not cache.is_dir() or not any(cache.glob(".preparing-*"))
