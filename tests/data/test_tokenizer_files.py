"""Which files a tokenizer has, and by which digest a run and its peers know them."""

from pathlib import Path

import pytest

from swarm.config import DataConfig
from swarm.data import tokenizer_files, tokenizers
from swarm.data.tokenizer_files import MOST_BYTES, SERVED, TOKENIZER, TokenizerFiles
from swarm.errors import IntegrityError
from tests.support.tokenizers import write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "model" / TOKENIZER, ["one", "two"])
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (tmp_path / "model" / "weights.bin").write_text("nothing of a tokenizer")
    return tmp_path / "model"


def test_a_folder_and_its_tokenizer_json_name_the_same(folder: Path) -> None:
    files = tokenizer_files.read(folder)
    assert files.contents.keys() == {TOKENIZER, "tokenizer_config.json"}
    assert tokenizer_files.read(folder / TOKENIZER).digest == files.digest
    assert tokenizers.load(str(folder)).identity == tokenizers.load(str(folder / TOKENIZER)).identity
    other = (folder / TOKENIZER).rename(folder / "mine.json")
    assert tokenizer_files.read(other).digest == files.digest
    with pytest.raises(ValueError, match=r"a tokenizer needs a tokenizer\.json"):
        tokenizer_files.read(folder)


def test_the_digest_is_of_names_and_contents_alone(folder: Path) -> None:
    files = tokenizer_files.read(folder)
    assert TokenizerFiles(dict(sorted(files.contents.items(), reverse=True))).digest == files.digest
    (folder / "tokenizer_config.json").write_text('{"chat_template": "y"}')
    assert tokenizer_files.read(folder).digest != files.digest


def test_what_is_kept_is_whole_and_mended(folder: Path, tmp_path: Path) -> None:
    files, kept = tokenizer_files.read(folder), tmp_path / "cache" / "deep" / "kept"
    for _ in range(2):
        files.keep(kept)
        assert tokenizer_files.is_at(kept, files.digest)
    (kept / TOKENIZER).write_text("{}")
    assert not tokenizer_files.is_at(kept, files.digest)
    files.keep(kept)
    assert tokenizer_files.is_at(kept, files.digest)


def test_too_large_a_tokenizer_is_refused(folder: Path) -> None:
    with (folder / "vocab.json").open("wb") as file:
        file.truncate(MOST_BYTES)
    with pytest.raises(ValueError, match="has more than 32 MiB"):
        tokenizer_files.read(folder)


def test_a_list_is_checked(folder: Path) -> None:
    files = tokenizer_files.read(folder)
    assert tokenizer_files.digests_of(files.list).keys() == files.contents.keys()
    for content in (b"", b"[]", b'{"../x": "a"}', b'{"tokenizer.json": "a"}', b'{"vocab.json": 3}'):
        with pytest.raises(IntegrityError):
            tokenizer_files.digests_of(content)


def test_the_run_s_own_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(ValueError, match="the run's tokenizer is not on this machine: name a copy with --tokenizer"):
        tokenizers.load_for_run(DataConfig(tokenizer=SERVED), vocab_size=9)
