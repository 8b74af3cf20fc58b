"""A tokenizer that a class of the user's own gives: what it does, and who imports it."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from peers.generate import program as generate
from peers.model import program as model
from peers.shared import stopping
from peers.shared.tokenizer import have_tokenizer
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_model import own_config
from peers.status.view import Joining
from peers.trainer.program import open_text
from swarm.config import DataConfig, RunConfig
from swarm.data import corpora, tokenizers
from swarm.errors import CorpusMismatch
from swarm.rpc.entry import Entry
from tests.checkpoint.states import write_cut

SOURCE = """
import pathlib
pathlib.Path(__file__).with_name("imported").touch()

class Letters:
    letters = "abcdefgh .\\n"
    vocab_size = 12
    end = 11
    def encode(self, text):
        return [self.letters.index(letter) for letter in text]
    def decode(self, tokens):
        return "".join((self.letters + "$")[token] for token in tokens)

class Same(Letters):
    pass

class Swapped(Letters):
    letters = "bacdefgh .\\n"

class NoEnd(Letters):
    end, vocab_size = None, 11

class Beyond(Letters):
    vocab_size = 5

class Texts(Letters):
    def encode(self, text):
        return list(text)

class Breaks(Letters):
    def decode(self, tokens):
        raise RuntimeError("no\\nway")

class NotMade(Letters):
    def __init__(self):
        raise OSError("no disk")

class Nothing:
    pass
"""


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once the module has been imported."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "own_letters.py").write_text(SOURCE)
    monkeypatch.delitem(sys.modules, "own_letters", raising=False)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder / "imported"


def _load(name: str) -> tokenizers.Tokenizer:
    return tokenizers.load(f"class:own_letters:{name}")


def test_it_encodes_and_decodes_as_the_class_does(imported: Path) -> None:
    found = _load("Letters")
    assert found.encode("a bad.").tolist() == [0, 8, 1, 0, 3, 9]
    assert found.encode("a").dtype == np.uint8
    assert found.decode([0, 11, 200, 3]) == "a$d", "a token that it does not have is left out"
    assert found.decode([0, 11, 3], with_special=False) == "ad"
    assert (found.vocab_size, found.end, found.separator.tolist(), found.prefix.tolist()) == (12, 11, [11], [])
    assert found.bytes_of(3) == b"d"
    tokens, is_in_part = found.encode_parts("a bad cafe", [(2, 5), (6, 8)])
    assert found.decode(tokens) == "a bad cafe"
    assert found.decode(tokens[is_in_part]) == "badca"
    assert _load("NoEnd").separator.tolist() == [10]


def test_classes_are_told_apart_by_what_they_do(imported: Path) -> None:
    names = ("Letters", "Same", "Swapped", "NoEnd")
    one, same, *others = (_load(name).identity for name in names)
    assert one == same
    assert len({one, *others}) == 3
    data = DataConfig(tokenizer="class:own_letters:Swapped", tokenizer_identity=one)
    with pytest.raises(CorpusMismatch, match=r"the class has to do here what it does on the run's other machines$"):
        tokenizers.load_for_run(data, vocab_size=12)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("Nothing", "is not a class with encode, decode and vocab_size$"),
        ("NotMade", "fails in its constructor: OSError: no disk$"),
        ("Breaks", "fails in decode: RuntimeError: no way$"),
    ],
)
def test_what_it_does_wrong_is_one_line(name: str, fault: str, imported: Path) -> None:
    with pytest.raises(ValueError, match=rf"^data\.tokenizer '(class:)?own_letters:{name}' {fault}") as raised:
        _load(name)
    assert "\n" not in str(raised.value)


def _run(folder: Path) -> RunConfig:
    """A run whose tokenizer is such a class, as its first peer publishes it."""
    (folder / "text.txt").write_text("a bad cafe. " * 2000)
    options = PeerOptions(
        preset="tiny", dataset=(str(folder / "text.txt"),), tokenizer="class:own_letters:Letters", max_tokens=6000
    )
    config = own_config(options, None, folder / "cache" / "swarm")
    assert config is not None
    return config


async def test_a_run_has_it_and_trainers_import_it_if_their_user_names_it(tmp_path: Path, imported: Path) -> None:
    config, name = _run(tmp_path), "class:own_letters:Letters"
    assert (config.data.tokenizer, config.data.tokenizer_identity) == (name, _load("Letters").identity)
    assert (config.data.tokenizer_files, config.data.max_tokens) == ("", 6000)
    trainer = Joining.at(config, [Entry.parse(f"{'a' * 40}@192.0.2.1:5001")], insecure=False).trainer
    assert trainer.endswith(f" --steps 100 --tokenizer {name}")
    member: Any = SimpleNamespace(config=config)
    with pytest.raises(ValueError, match=f"if you trust that code, add --tokenizer {name}$"):
        await have_tokenizer(member, tmp_path / "cache")
    corpus = open_text(config, (), name).corpus
    assert len(corpus.sources[0].tokens) == 6000
    assert corpora.prepare(config.data, cache_dir=tmp_path / "cache" / "swarm" / "corpora").digest == config.data.digest
    with pytest.raises(CorpusMismatch):
        open_text(config, (), "class:own_letters:Swapped")


def test_checkpoints_make_nobody_import_it_and_are_exported_without_it(
    tmp_path: Path, imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _run(tmp_path)
    imported.unlink()
    del sys.modules["own_letters"]
    name, checkpoints = config.data.tokenizer, tmp_path / "checkpoints"
    checkpoints.mkdir()
    write_cut(checkpoints, config, 1)
    writes = ["--checkpoint", str(checkpoints), "--prompt", "a bad", "--max-tokens", "5"]
    exports = ["export", "--checkpoint", str(checkpoints), "--output", str(tmp_path / "out")]
    for prog, main, arguments in (("swarm-generate", generate.main, writes), ("swarm-model", model.main, exports)):
        assert stopping.run_program(prog, lambda main=main, arguments=arguments: main(arguments)) == 2  # type: ignore[misc]
        assert f"if you trust that code, add --tokenizer {name}" in capsys.readouterr().err
    assert not imported.exists()
    assert generate.main([*writes, "--tokenizer", name]) == 0
    assert capsys.readouterr().out.startswith("a bad")
    assert imported.exists()
    assert model.main([*exports, "--tokenizer", name]) == 0
    assert f"{name} is code, and is not in this folder" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("tokenizer*"))
    assert "from own_letters import Letters" in (tmp_path / "out" / "README.md").read_text()
    # Without a tokenizer of its own the export is read with the class as well.
    assert generate.main(["--model", str(tmp_path / "out"), *writes[2:], "--tokenizer", name]) == 0
    assert capsys.readouterr().out.startswith("a bad")
