"""Corpora of one or several datasets: which text they hold, in which order, and their digests."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from swarm.config import DataConfig
from swarm.data import corpora
from swarm.data.microbatches import Microbatches
from swarm.errors import CorpusMismatch
from swarm.training.samples import TOKENS
from tests.data.texts import NUM_FILES, config_of, decoded, text_of


def test_every_document_once_and_whole(folder: Path, cache: Path) -> None:
    text = decoded(corpora.prepare(config_of(folder), cache_dir=cache))
    assert sorted(text.splitlines()) == sorted(text_of(number) for number in range(NUM_FILES))


def _several(*datasets: Path, **changes: Any) -> DataConfig:
    return dataclasses.replace(config_of("stdlib", **changes), dataset=tuple(map(str, datasets)))


def test_several_datasets_are_each_what_they_are_alone(folder: Path, tmp_path: Path, cache: Path) -> None:
    """Each dataset has a held-out part of its own, and a dataset that was already prepared is not prepared again."""
    parts = [folder / "part0", folder / "part1", folder / "part2"]
    alone = [corpora.prepare(config_of(part), cache_dir=cache) for part in parts]
    files = sorted(cache.iterdir())
    corpus = corpora.prepare(_several(*parts), cache_dir=cache)
    assert sorted(cache.iterdir()) == files
    for source, other in zip(corpus.sources, alone, strict=True):
        assert np.array_equal(source.training, other.sources[0].training)
        assert np.array_equal(source.held_out, other.sources[0].held_out)
    assert corpus.digest not in {other.digest for other in alone}


def test_the_digest_covers_every_dataset_and_their_order(folder: Path, tmp_path: Path, cache: Path) -> None:
    parts = [folder / "part0", folder / "part1"]
    copies = [Path(shutil.copytree(part, tmp_path / f"copy of {part.name}")) for part in parts]
    digests = [corpora.prepare(_several(*each), cache_dir=cache).digest for each in (parts, copies, parts[::-1])]
    assert digests[0] == digests[1] != digests[2]
    first = corpora.published(_several(*parts), corpora.prepare(_several(*parts), cache_dir=cache), None)
    (copies[1] / "more.txt").write_text(text_of(99))
    for changes, named in (
        ({"digest": digests[0]}, r"data\.dataset '[^']*copy of part0', '[^']*copy of part1' is different text here"),
        (
            {"digest": digests[0], "dataset_digests": first.dataset_digests},
            r"data\.dataset '[^']*copy of part1' is diff",
        ),
    ):
        config = _several(*copies, **changes)
        corpus = corpora.in_order(config, corpora.prepare(config, cache_dir=cache))
        with pytest.raises(CorpusMismatch, match=named):
            corpora.check_digest(config, corpus)


def test_datasets_are_found_in_whichever_order_they_are_named(folder: Path, tmp_path: Path, cache: Path) -> None:
    """A third machine's copies give the same samples, with the run's names and weights."""
    parts = [folder / f"part{number}" for number in range(3)]
    config = dataclasses.replace(_several(*parts), weights=(3.0, 1.0, 1.0))
    here = corpora.prepare(config, cache_dir=cache)
    run = corpora.published(config, here, None)
    assert len(run.dataset_digests) == 3
    elsewhere = [shutil.copytree(part, tmp_path / "elsewhere" / part.name) for part in (parts[2], *parts[:2])]
    there = corpora.in_order(run, corpora.prepare(_several(*elsewhere), cache_dir=tmp_path / "other"))
    corpora.check_digest(run, there)
    samples = [Microbatches(corpus, run) for corpus in (here, there)]
    assert all(np.array_equal(samples[0].tokens(index), samples[1].tokens(index)) for index in range(5))
    held_out = [[(each.name, each.batches[0][TOKENS].tolist()) for each in s.held_out_by_source(6)] for s in samples]
    assert held_out[0] == held_out[1]
    assert (
        corpora.published(
            config_of(parts[0]), corpora.prepare(config_of(parts[0]), cache_dir=cache), None
        ).dataset_digests
        == ()
    )


def test_the_digest_covers_which_path_takes_which_dataset(folder: Path, cache: Path) -> None:
    one, other = str(folder / "part0"), str(folder / "part1")

    def digest(*paths: str) -> str:
        config = dataclasses.replace(config_of("stdlib"), paths=paths)
        corpus = corpora.prepare(config, cache_dir=cache)
        assert len(corpora.published(config, corpus, None).dataset_digests) in (0, 2)
        return corpus.digest

    assert len({digest(*paths) for paths in ((one, other), (other, one), (one, other, one), (one, other, other))}) == 4
    assert digest(one, one) == corpora.prepare(config_of(one), cache_dir=cache).digest, "all paths share it, in turn"


def test_of_several_datasets_the_one_that_is_too_short_is_named(folder: Path, tmp_path: Path, cache: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("x" * 15)
    message = "short.txt' is too short: 8 tokens to train on and 8 held out, where a sample needs 9 to train on, and"
    with pytest.raises(ValueError, match=message):
        corpora.prepare(_several(folder, short), cache_dir=cache)
    with pytest.raises(ValueError, match="nowhere' does not exist"):
        corpora.prepare(_several(folder, tmp_path / "nowhere"), cache_dir=cache)


def test_digest_depends_on_text_and_tokenizer(folder: Path, cache: Path) -> None:
    before = corpora.prepare(config_of(folder), cache_dir=cache)
    (folder / "part0" / "0.txt").write_text(text_of(0).replace("0 bees", "no bees", 1))
    after = corpora.prepare(config_of(folder), cache_dir=cache)
    tokenizer = folder.parent / "tokenizer.json"
    words = library.Tokenizer(WordLevel({"[UNK]": 0, "bees": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tokenizer))
    tokenized = corpora.prepare(config_of(folder, tokenizer=str(tokenizer)), cache_dir=cache)
    assert len({before.digest, after.digest, tokenized.digest}) == 3
    assert tokenized.vocab_size == 2
    assert set(tokenized.sources[0].tokens.tolist()) == {0, 1}


def test_check_digest(folder: Path, cache: Path) -> None:
    config = config_of(folder)
    corpus = corpora.prepare(config, cache_dir=cache)
    corpora.check_digest(config, corpus)
    corpora.check_digest(dataclasses.replace(config, digest=corpus.digest), corpus)
    for dataset, advice in [
        (str(folder), "copy the files from a machine of the run"),
        ("stdlib", "use the Python that the run's first peer uses"),
        ("hf:bees", "the dataset has changed"),
    ]:
        other = dataclasses.replace(config, dataset=dataset, digest="ab" * 32)
        with pytest.raises(CorpusMismatch, match=advice) as caught:
            corpora.check_digest(other, corpus)
        message = str(caught.value)
        assert dataset in message
        assert corpus.digest[:12] in message
        assert "abababababab" in message
        assert "\n" not in message


def test_a_text_for_validation_is_evaluated_and_all_of_the_dataset_is_learnt(folder: Path, cache: Path) -> None:
    own = folder.parent / "own.txt"
    own.write_text("What nobody trains on. " * 9)
    without = corpora.prepare(config_of(folder), cache_dir=cache)
    config = config_of(folder, validation=str(own))
    corpus = corpora.prepare(config, cache_dir=cache)
    source = corpus.sources[0]
    assert np.array_equal(source.training, without.sources[0].tokens)
    assert source.held_out.tobytes().decode() == own.read_text() + "\n"
    evaluated = Microbatches(corpus, config).held_out(1)[0][TOKENS]
    assert bytes(evaluated[0].tolist()).decode() == own.read_text()[: config.sequence_length + 1]
    # The run's digest stands for both texts.
    own.write_text("What others evaluate on. " * 9)
    other = corpora.prepare(config, cache_dir=cache)
    assert len({without.digest, corpus.digest, other.digest}) == 3
    with pytest.raises(CorpusMismatch, match=r"with data\.validation '[^']*own\.txt' is different text here"):
        corpora.check_digest(dataclasses.replace(config, digest=corpus.digest), other)
    own.write_text("short")
    with pytest.raises(ValueError, match=r"^data\.validation '[^']*own\.txt' is too short: it has 6 tokens, and 9 are"):
        corpora.prepare(config, cache_dir=cache)
    own.unlink()
    with pytest.raises(ValueError, match=r"^data\.validation '[^']*own\.txt' does not exist"):
        corpora.prepare(config, cache_dir=cache)
