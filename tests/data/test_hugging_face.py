"""Datasets of Hugging Face through the library itself, from a folder that lies as one on the hub does.

Without the extra `hf` this module is skipped. The library takes a while to import.
"""

import dataclasses
from pathlib import Path

import pytest

from swarm.config import DataConfig
from swarm.data import corpora
from tests.data.texts import end_of_preparation

pytestmark = pytest.mark.slow


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    folder = tmp_path / "TinyStories" / "data"
    folder.mkdir(parents=True)
    for shard in range(2):
        rows = {"text": [f"Story {shard}.{number}" for number in range(50)]}
        parquet.write_table(pyarrow.table(rows), folder / f"train-{shard:05}-of-00002.parquet")
    parquet.write_table(pyarrow.table({"text": ["Held out"]}), folder / "validation-00000-of-00001.parquet")
    return folder.parent


def _config(dataset: str) -> DataConfig:
    return DataConfig(dataset=dataset, sequence_length=8, microbatch_size=2, held_out_fraction=0.1)


def test_shards_are_read_in_their_order_and_a_split_alone(stories: Path, tmp_path: Path) -> None:
    corpus = corpora.prepare(_config(f"hf:{stories}"), cache_dir=tmp_path / "cache")
    expected = [f"Story {shard}.{number}" for shard in range(2) for number in range(50)]
    assert corpus.sources[0].tokens.tobytes().decode().splitlines() == expected


def test_parts_go_over_the_ends_of_shards_and_of_the_dataset(stories: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(_config(f"hf:{stories}"), part_rows=30)
    corpus = corpora.prepare(config, cache_dir=tmp_path / "cache")
    [source] = corpus.sources
    assert source.parts is not None
    stored = [source.held_out, *(source.parts.want(number).result(60).tokens for number in range(4))]
    expected = [f"Story {shard}.{number}" for shard in range(2) for number in range(50)]
    found = [line for tokens in stored for line in tokens.tobytes().decode().splitlines()]
    assert found == [*expected, *expected[3 : 3 + 4 * 30 - 97]]
    late = corpora.prepare(config, cache_dir=tmp_path / "late").sources[0].parts
    assert late is not None
    for number in (2, 40):
        start = number * 30 % 97
        assert late.want(number).result(60).tokens.tobytes().decode().splitlines() == (expected[3:] * 2)[start:][:30]
    end_of_preparation()
