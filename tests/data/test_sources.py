"""Datasets by their names: the standard library, random tokens, Hugging Face's through a stand-in, and none at all."""

import sys
from pathlib import Path

import numpy as np
import pytest

from swarm.config import DataConfig
from swarm.data import corpora, text_files
from tests.data.texts import Rows, assert_refused, config_of, decoded


def test_stdlib(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The default dataset is there on every machine, and its tests are not in it."""
    corpus = corpora.prepare(DataConfig(max_tokens=300_000), cache_dir=cache)
    names = {path.name for path in text_files.find("stdlib").files}
    assert len(corpus.sources[0].tokens) == 300_000
    assert not caplog.messages
    assert {"argparse.py", "topics.py"} <= names
    assert not any(name.startswith(("test_argparse", "_sysconfigdata", "python-config")) for name in names)


def test_dummy_is_random_tokens_that_are_the_same_everywhere(cache: Path) -> None:
    corpus = corpora.prepare(config_of("dummy", max_tokens=1 << 16), cache_dir=cache)
    (source,) = corpus.sources
    assert len(source.tokens) == 1 << 16
    counts = np.bincount(source.tokens, minlength=256)
    assert len(counts) == 256
    assert 150 < counts.min() < counts.max() < 360
    assert corpus.digest == "ff0ed62fdce19badf38f24b62ad27b74e36174b6e5b98a0c248278a6707a06ce"
    assert len(corpora.prepare(config_of("dummy"), cache_dir=cache).sources[0].tokens) == 1 << 22


def test_hugging_face(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([{"text": f"row {number} of many"} for number in range(50)])
    rows.install(monkeypatch)
    config = config_of("hf:some/bees", hf_config="v1", hf_split="validation")
    corpus = corpora.prepare(config, cache_dir=cache)
    assert decoded(corpus) == "".join(f"row {number} of many\n" for number in range(50))
    assert corpora.prepare(config, cache_dir=cache).digest == corpus.digest
    assert rows.asked == [("some/bees", "v1", "validation", True)]


def test_missing_dataset(tmp_path: Path, cache: Path) -> None:
    assert_refused(config_of(tmp_path / "nowhere"), cache, "does not exist; .* well-known texts are tiny Shakespeare")
    assert_refused(config_of(Path("~nobody-of-this-name/x")), cache, "'~nobody-of-this-name/x' does not exist")


def test_hugging_face_without_the_extra(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert_refused(config_of("hf:bees"), cache, r"needs datasets; in swarm's folder: .*pip install .*'\.\[hf\]'")


@pytest.mark.parametrize("error", [ConnectionError("no\nnetwork"), ValueError("Bad split:\nnope")])
def test_hugging_face_that_cannot_be_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    Rows([], error).install(monkeypatch)
    with caplog.at_level("INFO"):
        assert_refused(config_of("hf:bees"), cache, "cannot load data.dataset 'hf:bees': ")
    assert caplog.messages == ["asks Hugging Face for the dataset bees"]
