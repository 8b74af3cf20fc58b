"""A dataset becomes one file of tokens: what is skipped, what is kept of it, and several processes at once."""

import gzip
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from swarm.config import DataConfig
from swarm.data import corpora, prepared, rows, text_files, tokenizers
from swarm.data.microbatches import Microbatches
from tests.data.texts import NUM_FILES, Rows, assert_refused, config_of, decoded

ROOT = Path(__file__).parents[2]


def test_cache_is_used(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = corpora.prepare(config_of(folder), cache_dir=cache)
    monkeypatch.setattr(text_files, "pieces", None)
    second = corpora.prepare(config_of(folder, sequence_length=4), cache_dir=cache)
    assert second.digest == first.digest
    assert np.array_equal(second.sources[0].tokens, first.sources[0].tokens)
    assert isinstance(second.sources[0].tokens, np.memmap)
    assert not second.sources[0].tokens.flags.writeable


def test_what_a_power_cut_left_is_prepared_again(folder: Path, cache: Path) -> None:
    first = corpora.prepare(config_of(folder), cache_dir=cache)
    (about,) = cache.glob("*.json")
    about.write_bytes(b"")
    second = corpora.prepare(config_of(folder), cache_dir=cache)
    assert second.digest == first.digest
    assert about.read_bytes()


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
    clean = corpora.prepare(config_of(folder), cache_dir=cache)
    _add_what_is_no_text(folder)
    (folder / ".hidden.txt").write_text("secret")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    assert corpora.prepare(config_of(folder), cache_dir=cache).digest == clean.digest


def test_skipped_files_are_named_each_time(folder: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpora.prepare(config_of(folder), cache_dir=cache)
    assert not caplog.messages
    lines = _add_what_is_no_text(folder)
    for _ in range(2):
        caplog.clear()
        corpora.prepare(config_of(folder), cache_dir=cache)
        assert caplog.messages == lines


def test_of_many_skipped_files_some_are_named_and_all_are_counted(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(50):
        (folder / f"{number}.png").write_bytes(b"\x89PNG")
    corpora.prepare(config_of(folder), cache_dir=cache)
    assert len(caplog.messages) == 21
    assert caplog.messages[-1] == f"skipped 50 of the {NUM_FILES + 50} files of {folder}"


def test_a_name_that_no_line_can_hold(folder: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / os.fsdecode(b"new\nline\xff")).write_bytes(b"\xff")
    for _ in range(2):
        corpora.prepare(config_of(folder), cache_dir=cache)
        assert caplog.messages[-2] == f"skipped {folder}/new?line?: not UTF-8 at byte 0"


def test_one_file_keeps_its_characters(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and line ends leave no trace."""
    monkeypatch.setattr(text_files, "PIECE_CHARACTERS", 10)
    text = "one\r\ntwo\rthree \u4e2d\u6587\n\n" * 40
    path = tmp_path / "one.txt"
    path.write_bytes(text.encode())
    assert decoded(corpora.prepare(config_of(path), cache_dir=cache)) == text + "\n"


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
    corpus = corpora.prepare(config_of(path, tokenizer=str(tmp_path / "tokenizer.json")), cache_dir=cache)
    assert corpus.sources[0].tokens.tolist() == [*tokenizer.encode(text), *tokenizer.separator]


@pytest.mark.parametrize("words", [pytest.param("the bees of this swarm ", marks=pytest.mark.slow), "\u4e2d\u6587"])
@pytest.mark.parametrize(("tokenizer", "size_mib", "piece_characters"), [
    pytest.param("bytes", 64, 2**18, marks=pytest.mark.slow), ("bpe", 2, 2**14),
])  # fmt: skip
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
    whole = corpora.prepare(config_of(folder), cache_dir=cache)
    part = corpora.prepare(config_of(folder, max_tokens=500), cache_dir=cache)
    assert np.array_equal(part.sources[0].tokens, whole.sources[0].tokens[:500])
    assert part.digest != whole.digest


def test_two_processes_at_once(tmp_path: Path, cache: Path) -> None:
    """Both get the same corpus, and nothing but that corpus is left."""
    path = tmp_path / "big.txt"
    path.write_text("".join(f"line {number}\n" for number in range(20_000)))
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


def test_a_text_that_another_process_prepares_is_not_fetched_as_well(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_fetches, waits = 0, threading.Event()

    def fetch(dataset: str, config: DataConfig) -> Iterator[rows.Row]:
        nonlocal num_fetches
        num_fetches += 1
        assert waits.wait(30)
        yield from (rows.Row("row", {"text": "a story"}) for _ in range(100))

    def say(line: str, *_: object) -> None:
        if "another process" in line:
            waits.set()

    monkeypatch.setattr(rows, "of_hugging_face", fetch)
    monkeypatch.setattr(prepared.logger, "info", say)
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(corpora.prepare, config_of("hf:bees"), cache_dir=cache) for _ in range(2)]
        first, second = (one.result() for one in both)
    assert first.digest == second.digest
    assert num_fetches == 1


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
config = DataConfig(dataset=sys.argv[1], sequence_length=8, microbatch_size=2, max_tokens=int(sys.argv[3]))
corpora.prepare(config, cache_dir=Path(sys.argv[2]))
"""
    command = [sys.executable, "-c", program, str(folder), str(cache)]
    processes: list[subprocess.Popen[str]] = []
    folders: list[Path] = []
    for most in ("500", "600"):  # They would wait for each other if they prepared the same.
        process = subprocess.Popen([*command, most], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
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
    corpora.prepare(config_of(folder), cache_dir=cache)
    assert set(cache.glob(".preparing-*")) == {alive, new}
    os.utime(new, (1, 1))
    corpora.prepare(config_of(folder), cache_dir=cache)
    assert set(cache.glob(".preparing-*")) == {alive}, "also when the corpus is there already"
    processes[0].communicate(timeout=30)
    assert not list(cache.glob(".preparing-*"))


@pytest.mark.parametrize(
    ("length", "fraction", "train", "held_out"), [(499, 0.98, 10, 490), (15, 0.02, 8, 8), (20, 0.02, 12, 9)]
)
def test_too_short(tmp_path: Path, cache: Path, length: int, fraction: float, train: int, held_out: int) -> None:
    """The part to train on cannot fill a microbatch, or the held-out part a sample."""
    path = tmp_path / "short.txt"
    path.write_text("x" * length)
    told = f"too short: {train} tokens to train on and {held_out} held out, where a microbatch needs 17 to train on"
    assert_refused(config_of(path, held_out_fraction=fraction), cache, told)


def test_what_is_held_out_of_a_short_text_may_be_smaller_than_a_microbatch(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 300)
    config = config_of(path, held_out_fraction=0.02)
    corpus = corpora.prepare(config, cache_dir=cache)
    assert len(corpus.sources[0].held_out) == config.sequence_length + 1
    [batch] = Microbatches(corpus, config).held_out(100)
    assert batch["tokens"].shape == (1, config.sequence_length + 1)


@pytest.mark.parametrize("name", ["text.txt.gz", "text.gz"])
def test_a_compressed_text_is_the_text(name: str, tmp_path: Path, cache: Path) -> None:
    text = "Line \u00fc\n" * 500
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    plain, packed = (corpora.prepare(config_of(tmp_path / each), cache_dir=cache) for each in ("text.txt", name))
    assert plain.digest == packed.digest


def test_a_damaged_compressed_text_is_left_out_and_named(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(os.urandom(5000))[:-200])
    assert_refused(config_of(path), cache, "text")


def test_just_long_enough(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 33)
    corpus = corpora.prepare(config_of(path, held_out_fraction=0.5), cache_dir=cache)
    assert len(corpus.sources[0].training) == len(corpus.sources[0].held_out) == 17


def test_cache_that_cannot_be_written(folder: Path) -> None:
    assert_refused(
        config_of(folder),
        folder / "part0" / "0.txt",
        r"cannot prepare .*0\.txt.*; the environment's XDG_CACHE_HOME can name another place",
    )


def test_how_far_a_long_preparation_is(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Rows([{"text": "x" * 99_999}] * 3).install(monkeypatch)
    monkeypatch.setattr(prepared, "_SAY_SECONDS", 0.0)
    with caplog.at_level("INFO"):
        corpora.prepare(config_of("hf:bees"), cache_dir=cache)
        corpora.prepare(config_of("hf:bees", max_tokens=250_000), cache_dir=cache)
    assert "preparing hf:bees: 0.3 million tokens so far; data.max_tokens would end it sooner" in caplog.messages
    assert "preparing hf:bees: 0.1 million tokens of 0.2" in caplog.messages
