import dataclasses
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as library
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from tokenizers.trainers import BpeTrainer

from swarm.config import DataConfig
from swarm.data import corpora, prepared, text_files, tokenizers
from swarm.data.microbatches import Microbatches
from swarm.errors import CorpusMismatch
from swarm.training.samples import TOKENS

ROOT = Path(__file__).parents[2]
NUM_FILES = 30


def _config(dataset: Path | str, **changes: Any) -> DataConfig:
    settings: dict[str, Any] = {"sequence_length": 8, "microbatch_size": 2, "held_out_fraction": 0.1, **changes}
    return DataConfig(dataset=str(dataset), **settings)


def _text(number: int) -> str:
    return f"File {number} says: " + f"{number} bees. " * (number + 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for number in range(NUM_FILES):
        path = root / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_text(number))
    return root


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def _decoded(corpus: corpora.Corpus) -> str:
    return corpus.sources[0].tokens.tobytes().decode()


def test_every_document_once_and_whole(folder: Path, cache: Path) -> None:
    text = _decoded(corpora.prepare(_config(folder), cache_dir=cache))
    assert sorted(text.splitlines()) == sorted(_text(number) for number in range(NUM_FILES))


def test_order_is_not_the_order_of_names(folder: Path, cache: Path) -> None:
    """The end is held out, and must not be the last folder alone."""
    lines = _decoded(corpora.prepare(_config(folder), cache_dir=cache)).splitlines()
    by_name = [_text(int(path.stem)) for path in sorted(folder.rglob("*.txt"))]
    assert lines != by_name
    assert len({int(line.split()[1]) % 3 for line in lines[-8:]}) == 3


def test_parts_cover_the_corpus(folder: Path, cache: Path) -> None:
    corpus = corpora.prepare(_config(folder, held_out_fraction=0.25), cache_dir=cache)
    assert len(corpus.sources[0].held_out) == len(corpus.sources[0].tokens) // 4
    assert np.array_equal(
        np.concatenate([corpus.sources[0].training, corpus.sources[0].held_out]), corpus.sources[0].tokens
    )


def _several(*datasets: Path, **changes: Any) -> DataConfig:
    return dataclasses.replace(_config("stdlib", **changes), dataset=tuple(map(str, datasets)))


def test_several_datasets_are_each_what_they_are_alone(folder: Path, tmp_path: Path, cache: Path) -> None:
    """Each has a held-out part of its own; what was prepared of one of them is used again."""
    parts = [folder / "part0", folder / "part1", folder / "part2"]
    alone = [corpora.prepare(_config(part), cache_dir=cache) for part in parts]
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
    (copies[1] / "more.txt").write_text(_text(99))
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
        corpora.published(_config(parts[0]), corpora.prepare(_config(parts[0]), cache_dir=cache), None).dataset_digests
        == ()
    )


def test_of_several_datasets_the_one_that_is_too_short_is_named(folder: Path, tmp_path: Path, cache: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("x" * 30)
    message = "short.txt' is too short: 28 tokens to train on and 3 held out, where a sample needs 9 in each; give"
    with pytest.raises(ValueError, match=message):
        corpora.prepare(_several(folder, short), cache_dir=cache)
    with pytest.raises(ValueError, match="nowhere' does not exist"):
        corpora.prepare(_several(folder, tmp_path / "nowhere"), cache_dir=cache)


def test_digest_is_independent_of_location(folder: Path, tmp_path: Path) -> None:
    """The same text lies elsewhere, has other times, and is named by a glob."""
    copy = tmp_path / "far" / "away"
    shutil.copytree(folder, copy)
    os.utime(copy / "part0" / "0.txt", (1, 1))
    here = corpora.prepare(_config(folder), cache_dir=tmp_path / "a")
    there = corpora.prepare(_config(copy), cache_dir=tmp_path / "b")
    by_glob = corpora.prepare(_config(f"{copy}/**/*.txt"), cache_dir=tmp_path / "c")
    assert here.digest == there.digest == by_glob.digest
    assert np.array_equal(here.sources[0].tokens, there.sources[0].tokens)


def test_digest_depends_on_text_and_tokenizer(folder: Path, cache: Path) -> None:
    before = corpora.prepare(_config(folder), cache_dir=cache)
    (folder / "part0" / "0.txt").write_text(_text(0).replace("0 bees", "no bees", 1))
    after = corpora.prepare(_config(folder), cache_dir=cache)
    tokenizer = folder.parent / "tokenizer.json"
    words = library.Tokenizer(WordLevel({"[UNK]": 0, "bees": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tokenizer))
    tokenized = corpora.prepare(_config(folder, tokenizer=str(tokenizer)), cache_dir=cache)
    assert len({before.digest, after.digest, tokenized.digest}) == 3
    assert tokenized.vocab_size == 2
    assert set(tokenized.sources[0].tokens.tolist()) == {0, 1}


def test_cache_is_used(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = corpora.prepare(_config(folder), cache_dir=cache)
    monkeypatch.setattr(text_files, "pieces", None)
    second = corpora.prepare(_config(folder, sequence_length=4), cache_dir=cache)
    assert second.digest == first.digest
    assert np.array_equal(second.sources[0].tokens, first.sources[0].tokens)
    assert isinstance(second.sources[0].tokens, np.memmap)
    assert not second.sources[0].tokens.flags.writeable


def _add_what_is_no_text(folder: Path) -> list[str]:
    """Add files that are skipped, and return the lines that say so."""
    (folder / "image.txt").write_bytes(b"PNG\0\0")
    (folder / "latin.txt").write_bytes(b"." * 240_000 + b"na\xefve")
    (folder / "broken.txt").symlink_to(folder / "nowhere")
    return [
        f"skipped {folder}/broken.txt: No such file or directory",
        f"skipped {folder}/image.txt: a NUL character at byte 3",
        f"skipped {folder}/latin.txt: not UTF-8 at byte 240002",
        f"skipped 3 of the {NUM_FILES + 3} files of {folder}",
    ]


def test_only_text_counts(folder: Path, cache: Path) -> None:
    clean = corpora.prepare(_config(folder), cache_dir=cache)
    _add_what_is_no_text(folder)
    (folder / ".hidden.txt").write_text("secret")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    assert corpora.prepare(_config(folder), cache_dir=cache).digest == clean.digest


def test_skipped_files_are_named_each_time(folder: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpora.prepare(_config(folder), cache_dir=cache)
    assert not caplog.messages
    lines = _add_what_is_no_text(folder)
    for _ in range(2):
        caplog.clear()
        corpora.prepare(_config(folder), cache_dir=cache)
        assert caplog.messages == lines


def test_of_many_skipped_files_some_are_named_and_all_are_counted(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(50):
        (folder / f"{number}.png").write_bytes(b"\x89PNG")
    corpora.prepare(_config(folder), cache_dir=cache)
    assert len(caplog.messages) == 21
    assert caplog.messages[-1] == f"skipped 50 of the {NUM_FILES + 50} files of {folder}"


def test_a_name_that_no_line_can_hold(folder: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / os.fsdecode(b"new\nline\xff")).write_bytes(b"\xff")
    for _ in range(2):
        corpora.prepare(_config(folder), cache_dir=cache)
        assert caplog.messages[-2] == f"skipped {folder}/new?line?: not UTF-8 at byte 0"


def test_one_file_keeps_its_characters(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and line ends leave no trace."""
    monkeypatch.setattr(text_files, "PIECE_CHARACTERS", 10)
    text = "one\r\ntwo\rthree \u4e2d\u6587\n\n" * 40
    path = tmp_path / "one.txt"
    path.write_bytes(text.encode())
    assert _decoded(corpora.prepare(_config(path), cache_dir=cache)) == text + "\n"


def _byte_level_bpe(path: Path) -> str:
    tokenizer = library.Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the bees of this swarm learn one language together"], trainer)
    tokenizer.save(str(path))
    return str(path)


def test_pieces_leave_no_trace_in_the_tokens_of_a_long_line(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens begin with the space before a word, as those of most tokenizers do."""
    tokenizer = tokenizers.load(_byte_level_bpe(tmp_path / "tokenizer.json"))
    text = "".join(f"the bees{' ' * (number % 4)} of this, {number} swarms\t learn " for number in range(300))
    path = tmp_path / "line.txt"
    path.write_text(text)
    monkeypatch.setattr(text_files, "PIECE_CHARACTERS", 100)
    corpus = corpora.prepare(_config(path, tokenizer=str(tmp_path / "tokenizer.json")), cache_dir=cache)
    assert corpus.sources[0].tokens.tolist() == [*tokenizer.encode(text), *tokenizer.separator]


@pytest.mark.parametrize("words", [pytest.param("the bees of this swarm ", marks=pytest.mark.slow), "\u4e2d\u6587"])
@pytest.mark.parametrize(("tokenizer", "size_mib", "piece_characters"), [("bytes", 64, 2**18), ("bpe", 2, 2**14)])
def test_a_file_of_one_line_is_not_held_whole(
    tmp_path: Path, cache: Path, tokenizer: str, words: str, size_mib: int, piece_characters: int
) -> None:
    """Peak memory stays far below the 190 MiB and more that it takes to tokenize the line at once."""
    path = tmp_path / "line.txt"
    block = (words * 2**20)[: 2**20 // len(words.encode()) * len(words)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(size_mib):
            file.write(block)
    if tokenizer == "bpe":
        tokenizer = _byte_level_bpe(tmp_path / "tokenizer.json")
    program = (
        "import resource, sys; from pathlib import Path; from swarm.config import DataConfig\n"
        "from swarm.data import corpora, text_files\n"
        "text_files.PIECE_CHARACTERS = int(sys.argv[4])\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == 'darwin' "
        "else 2**10)\n"
        "before = peak()\n"
        "corpora.prepare(DataConfig(dataset=sys.argv[1], tokenizer=sys.argv[2]), cache_dir=Path(sys.argv[3]))\n"
        "print(peak() - before)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, str(path), tokenizer, str(cache), str(piece_characters)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert int(answer.stdout) < 80


def test_max_tokens(folder: Path, cache: Path) -> None:
    whole = corpora.prepare(_config(folder), cache_dir=cache)
    part = corpora.prepare(_config(folder, max_tokens=500), cache_dir=cache)
    assert np.array_equal(part.sources[0].tokens, whole.sources[0].tokens[:500])
    assert part.digest != whole.digest


def test_two_processes_at_once(tmp_path: Path, cache: Path) -> None:
    """Both get the same corpus, and nothing but that corpus is left."""
    path = tmp_path / "big.txt"
    path.write_text("".join(f"line {number}\n" for number in range(200_000)))
    program = (
        "import sys; from pathlib import Path; from swarm.config import DataConfig; from swarm.data import corpora\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "corpus = corpora.prepare(DataConfig(dataset=sys.argv[1]), cache_dir=Path(sys.argv[2]))\n"
        "print(corpus.digest, int(corpus.sources[0].tokens.sum()))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path), str(cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=30)[0] for process in processes]
    expected = sum(path.read_bytes()) + ord("\n")
    assert answers[0] == answers[1]
    assert answers[0].split()[1] == str(expected)
    assert sorted(file.suffix for file in cache.iterdir()) == [".json", ".tokens"]


def test_what_killed_processes_left_is_removed(folder: Path, cache: Path) -> None:
    """The folder of a living process stays, and so does one that its process has just made and not locked yet."""
    program = """
import sys
from pathlib import Path
from swarm.config import DataConfig
from swarm.data import corpora, text_files

def wait_before_reading(path, pieces=text_files.pieces):
    print("preparing", flush=True)
    sys.stdin.readline()
    return pieces(path)

text_files.pieces = wait_before_reading
corpora.prepare(DataConfig(dataset=sys.argv[1], sequence_length=8, microbatch_size=2), cache_dir=Path(sys.argv[2]))
"""
    command = [sys.executable, "-c", program, str(folder), str(cache)]
    processes: list[subprocess.Popen[str]] = []
    folders: list[Path] = []
    for _ in range(2):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None
        process.stdout.readline()
        processes.append(process)
        folders += set(cache.glob(".preparing-*")) - set(folders)
    alive, dead = folders
    processes[1].kill()
    processes[1].communicate()
    new, unlocked = cache / ".preparing-new", cache / ".preparing-unlocked"
    for path in (new, unlocked):
        path.mkdir()
        (path / "some.tokens").write_bytes(b"half")
    for path in (alive, dead, unlocked):
        os.utime(path, (1, 1))
    corpora.prepare(_config(folder), cache_dir=cache)
    assert set(cache.glob(".preparing-*")) == {alive, new}
    os.utime(new, (1, 1))
    corpora.prepare(_config(folder), cache_dir=cache)
    assert set(cache.glob(".preparing-*")) == {alive}, "also when the corpus is there already"
    processes[0].communicate(timeout=30)
    assert not list(cache.glob(".preparing-*"))


def test_stdlib(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The default dataset is there on every machine, and its tests are not in it."""
    corpus = corpora.prepare(DataConfig(max_tokens=300_000), cache_dir=cache)
    names = {path.name for path in text_files.find("stdlib").files}
    assert len(corpus.sources[0].tokens) == 300_000
    assert not caplog.messages
    assert {"argparse.py", "topics.py"} <= names
    assert not any(name.startswith(("test_argparse", "_sysconfigdata", "python-config")) for name in names)


class _Rows:
    """Stands in for the `datasets` library."""

    def __init__(
        self, rows: list[dict[str, Any]], error: Exception | None = None, late_error: Exception | None = None
    ) -> None:
        self.rows = rows
        self.error = error
        self.late_error = late_error
        self.asked: list[tuple[Any, ...]] = []

    def load_dataset(self, name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        self.asked.append((name, config, split, streaming))
        if self.error:
            raise self.error
        return self._all()

    def _all(self) -> Iterator[dict[str, Any]]:
        yield from self.rows
        if self.late_error:
            raise self.late_error

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("datasets")
        vars(module)["load_dataset"] = self.load_dataset
        monkeypatch.setitem(sys.modules, "datasets", module)


def test_dummy_is_random_tokens_that_are_the_same_everywhere(cache: Path) -> None:
    corpus = corpora.prepare(_config("dummy", max_tokens=1 << 16), cache_dir=cache)
    (source,) = corpus.sources
    assert len(source.tokens) == 1 << 16
    counts = np.bincount(source.tokens, minlength=256)
    assert len(counts) == 256
    assert 150 < counts.min() < counts.max() < 360
    assert corpus.digest == "ff0ed62fdce19badf38f24b62ad27b74e36174b6e5b98a0c248278a6707a06ce"
    assert len(corpora.prepare(_config("dummy"), cache_dir=cache).sources[0].tokens) == 1 << 22


def test_hugging_face(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _Rows([{"text": f"row {number} of many"} for number in range(50)])
    rows.install(monkeypatch)
    config = _config("hf:some/bees", hf_config="v1", hf_split="validation")
    corpus = corpora.prepare(config, cache_dir=cache)
    assert _decoded(corpus) == "".join(f"row {number} of many\n" for number in range(50))
    assert corpora.prepare(config, cache_dir=cache).digest == corpus.digest
    assert rows.asked == [("some/bees", "v1", "validation", True)]


def test_a_hugging_face_dataset_may_name_its_configuration_itself(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _Rows([{"text": f"row {number} of many"} for number in range(50)])
    rows.install(monkeypatch)
    config = dataclasses.replace(_config("hf:some/bees:v2", hf_config="v1"), dataset=("hf:some/bees:v2", "hf:wasps"))
    corpora.prepare(config, cache_dir=cache)
    assert [(name, configuration) for name, configuration, _, _ in rows.asked] == [("some/bees", "v2"), ("wasps", "v1")]


def test_hugging_face_is_read_no_further_than_needed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _Rows([{"text": "x" * 300}, {"text": "y" * 300}, {}])
    rows.install(monkeypatch)
    assert len(corpora.prepare(_config("hf:bees", max_tokens=500), cache_dir=cache).sources[0].tokens) == 500


def _refused(config: DataConfig, cache: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        corpora.prepare(config, cache_dir=cache)
    assert config.datasets[0] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not cache.is_dir() or not any(cache.glob(".preparing-*"))


def test_missing_dataset(tmp_path: Path, cache: Path) -> None:
    _refused(_config(tmp_path / "nowhere"), cache, "does not exist; give 'stdlib', a file, folder or glob of text, or")
    _refused(_config(Path("~nobody-of-this-name/x")), cache, "'~nobody-of-this-name/x' does not exist")


def test_no_text(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "empty").mkdir()
    for dataset in (tmp_path / "empty", tmp_path / "*.nothing"):
        _refused(_config(dataset), cache, "holds no text; give it files of UTF-8 text")


def test_no_text_says_where(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_bytes(b"." * 240_000 + b"\xff" + b"." * 240_000)
    advice = "give it files of UTF-8 text"
    _refused(_config(folder / "a"), cache, f"holds no text .*folder/a: not UTF-8 at byte 240000.; {advice}")
    os.mkfifo(folder / "b")
    _refused(_config(folder / "b"), cache, f"holds no text .*folder/b: not a regular file.; {advice}")
    _refused(
        _config(folder),
        cache,
        f"holds no text .*folder/a: not UTF-8 at byte 240000, and 1 more were skipped.; {advice}",
    )


@pytest.mark.parametrize("fraction", [0.02, 0.98])
def test_too_short(tmp_path: Path, cache: Path, fraction: float) -> None:
    """The part to train on or the held-out part cannot fill a microbatch."""
    path = tmp_path / "short.txt"
    path.write_text("x" * 499)
    train, held_out = sorted([10, 490], reverse=fraction < 0.5)
    _refused(
        _config(path, held_out_fraction=fraction),
        cache,
        f"too short: {train} tokens to train on and {held_out} held out, where a microbatch needs 17 in each; give",
    )


def test_just_long_enough(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 33)
    corpus = corpora.prepare(_config(path, held_out_fraction=0.5), cache_dir=cache)
    assert len(corpus.sources[0].training) == len(corpus.sources[0].held_out) == 17


def test_cache_that_cannot_be_written(folder: Path) -> None:
    _refused(_config(folder), folder / "part0" / "0.txt", "cannot prepare .*0.txt")


def test_hugging_face_without_the_extra(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    _refused(_config("hf:bees"), cache, r"needs datasets; in swarm's folder: .*pip install .*'\.\[hf\]'")


@pytest.mark.parametrize("error", [ConnectionError("no\nnetwork"), ValueError("Bad split:\nnope")])
def test_hugging_face_that_cannot_be_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    _Rows([], error).install(monkeypatch)
    with caplog.at_level("INFO"):
        _refused(_config("hf:bees"), cache, "cannot load data.dataset 'hf:bees': ")
    assert caplog.messages == ["asks Hugging Face for the dataset bees"]


def test_hugging_face_that_breaks_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _Rows([{"text": "x" * 300}], late_error=RuntimeError("an error of\nthe library's own")).install(monkeypatch)
    _refused(_config("hf:bees"), cache, "cannot load data.dataset 'hf:bees': an error of the library's own")


def test_how_far_a_long_preparation_is(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _Rows([{"text": "x" * 99_999}] * 3).install(monkeypatch)
    monkeypatch.setattr(prepared, "_SAY_SECONDS", 0.0)
    with caplog.at_level("INFO"):
        corpora.prepare(_config("hf:bees"), cache_dir=cache)
        corpora.prepare(_config("hf:bees", max_tokens=250_000), cache_dir=cache)
    assert "preparing hf:bees: 0.3 million tokens so far; data.max_tokens would end it sooner" in caplog.messages
    assert "preparing hf:bees: 0.1 million tokens of 0.2" in caplog.messages


def test_hugging_face_without_the_field(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _Rows([{"content": "buzz", "id": 1}]).install(monkeypatch)
    _refused(_config("hf:bees"), cache, "there is no text in 'text'; set data.text_field to one of: content, id")


def test_check_digest(folder: Path, cache: Path) -> None:
    config = _config(folder)
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
