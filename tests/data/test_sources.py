"""Datasets by their names: the standard library, random tokens, Hugging Face's through a stand-in, and none at all."""

import dataclasses
import os
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


def test_a_hugging_face_dataset_may_name_its_configuration_itself(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([{"text": f"row {number} of many"} for number in range(50)])
    rows.install(monkeypatch)
    config = dataclasses.replace(config_of("hf:some/bees:v2", hf_config="v1"), dataset=("hf:some/bees:v2", "hf:wasps"))
    corpora.prepare(config, cache_dir=cache)
    assert [(name, configuration) for name, configuration, _, _ in rows.asked] == [("some/bees", "v2"), ("wasps", "v1")]


def test_hugging_face_is_read_no_further_than_needed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([{"text": "x" * 300}, {"text": "y" * 300}, {}])
    rows.install(monkeypatch)
    assert len(corpora.prepare(config_of("hf:bees", max_tokens=500), cache_dir=cache).sources[0].tokens) == 500


def test_missing_dataset(tmp_path: Path, cache: Path) -> None:
    assert_refused(config_of(tmp_path / "nowhere"), cache, "does not exist; .* well-known texts are tiny Shakespeare")
    assert_refused(config_of(Path("~nobody-of-this-name/x")), cache, "'~nobody-of-this-name/x' does not exist")


def test_no_text(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "empty").mkdir()
    for dataset in (tmp_path / "empty", tmp_path / "*.nothing"):
        assert_refused(config_of(dataset), cache, "holds no text; give it files of UTF-8 text")


def test_no_text_says_where(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_bytes(b"." * 240_000 + b"\xff" + b"." * 240_000)
    advice = "give it files of UTF-8 text"
    assert_refused(config_of(folder / "a"), cache, f"holds no text .*folder/a: not UTF-8 at byte 240000.; {advice}")
    os.mkfifo(folder / "b")
    assert_refused(config_of(folder / "b"), cache, f"holds no text .*folder/b: not a regular file.; {advice}")
    assert_refused(
        config_of(folder),
        cache,
        f"holds no text .*folder/a: not UTF-8 at byte 240000, and 1 more were skipped.; {advice}",
    )


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


def test_hugging_face_that_breaks_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Rows([{"text": "x" * 300}], late_error=RuntimeError("an error of\nthe library's own")).install(monkeypatch)
    assert_refused(config_of("hf:bees"), cache, "cannot load data.dataset 'hf:bees': an error of the library's own")


def test_hugging_face_without_the_field(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Rows([{"content": "buzz", "id": 1}]).install(monkeypatch)
    assert_refused(
        config_of("hf:bees"), cache, "there is no text in 'text'; set data.text_field to one of: content, id"
    )
