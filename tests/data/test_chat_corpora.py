"""Corpora of conversations and completions, and of texts in rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from swarm.config import DataConfig
from swarm.data import corpora
from swarm.data.microbatches import Microbatches
from swarm.training import samples
from swarm.training.samples import DOCUMENTS, TARGETS, TOKENS
from tests.support.tokenizers import CHAT_TEMPLATE, write_chat_tokenizer

NUM_TALKS = 120


def _talk(number: int) -> dict[str, Any]:
    said = {"user": f"{number}?", "assistant": "Buzz. " * (number % 4)}
    return {"messages": [{"role": role, "content": text} for role, text in said.items()]}


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    return _write(tmp_path / "talks.jsonl", [_talk(number) for number in range(NUM_TALKS)])


def _config(dataset: Path, **changes: Any) -> DataConfig:
    settings = {"format": "chat", "sequence_length": 99, "microbatch_size": 2, "held_out_fraction": 0.1, **changes}
    tokenizer = dataset.parent / "tokenizer"
    if not tokenizer.exists():
        write_chat_tokenizer(tokenizer)
    return DataConfig(**{"dataset": str(dataset), "tokenizer": str(tokenizer / "tokenizer.json"), **settings})


def test_every_conversation_is_in_one_sample(talks: Path, cache: Path) -> None:
    """The tensors of a sample are the stored ones, at every position of the corpus."""
    config = _config(talks)
    corpus = corpora.prepare(config, cache_dir=cache)
    assert not corpus.is_text
    data = Microbatches(corpus, config)
    assert data.num_windows + len(corpus.sources[0].held_out) == len(corpus.sources[0].tokens)
    seen = [data.samples(index) for index in range(data.num_windows // 2)] + data.held_out(1000)
    for batch in seen:
        samples.require_sound(batch, corpus.vocab_size)
        assert batch.keys() == {TOKENS, TARGETS, DOCUMENTS}
    num_documents = sum(
        len(np.unique(record[DOCUMENTS][record[TOKENS] != 0]))
        for record in (*corpus.sources[0].training, *corpus.sources[0].held_out)
    )
    assert num_documents == NUM_TALKS
    assert int(corpus.sources[0].tokens[TARGETS].sum()) == sum(
        len(_talk(number)["messages"][1]["content"]) + 1 for number in range(NUM_TALKS)
    )


def test_the_digest_is_of_what_is_learnt_and_how(talks: Path, tmp_path: Path) -> None:
    """Neither the file's place nor its kind is part of the digest."""
    config = _config(talks)
    copy = tmp_path / "copy"
    copy.mkdir()
    tokenizer = str(talks.parent / "tokenizer" / "tokenizer.json")
    alike = [
        config,
        _config(_write(copy / "talks.jsonl", [_talk(n) for n in range(NUM_TALKS)]), tokenizer=tokenizer),
        _config(_write(tmp_path / "talks.parquet", [_talk(n) for n in range(NUM_TALKS)])),
    ]
    others = [
        _config(talks, packing=False),
        _config(talks, sequence_length=98),
        _config(_write(tmp_path / "other.jsonl", [_talk(n) for n in range(1, NUM_TALKS)])),
    ]
    digests = [corpora.prepare(each, cache_dir=tmp_path / str(n)).digest for n, each in enumerate(alike + others)]
    assert len(set(digests[:3])) == 1
    assert len(set(digests)) == 1 + len(others)


def test_another_template_is_another_corpus(talks: Path, cache: Path) -> None:
    """That also holds where a corpus was prepared with the earlier template."""
    config = _config(talks)
    before = corpora.prepare(config, cache_dir=cache)
    write_chat_tokenizer(talks.parent / "tokenizer", CHAT_TEMPLATE.replace("{{ '\n' }}", ""))
    assert corpora.prepare(config, cache_dir=cache).digest != before.digest


@pytest.mark.parametrize("format", ["chat", "completion", "text"])
def test_bad_rows_are_left_out_and_told_each_time(
    format: Any, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps({**_talk(1), "prompt": "a", "completion": "bc", "text": "Bees sleep at night."})
    bad = ["{", "[]", "{}", json.dumps({"text": 1}), json.dumps({"text": "\ud800"})]
    path.write_text("\n".join([good, *bad, *[good] * 99]), encoding="utf-8")
    config = _config(path, format=format)
    for _ in range(2):
        caplog.clear()
        corpus = corpora.prepare(config, cache_dir=cache)
        assert [message for message in caplog.messages if "left out" in message] == [
            f"5 rows of {path} left out; the first: {path}, row 2: the line cannot be read: it is not valid JSON: "
            "Expecting property name enclosed in double quotes: line 2 column 1 (char 2)"
        ]
    path.write_text("\n".join([good] * 100), encoding="utf-8")
    assert corpora.prepare(config, cache_dir=cache).digest == corpus.digest


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_texts_may_be_rows(suffix: str, tmp_path: Path, cache: Path) -> None:
    path = _write(tmp_path / f"a{suffix}", [{"body": f"line {number}", "id": number} for number in range(99)])
    config = DataConfig(
        dataset=str(path), text_field="body", sequence_length=8, microbatch_size=2, held_out_fraction=0.1
    )
    corpus = corpora.prepare(config, cache_dir=cache)
    assert corpus.sources[0].tokens.tobytes().decode().splitlines() == [f"line {number}" for number in range(99)]
