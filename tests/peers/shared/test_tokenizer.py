"""The run's tokenizer is fetched from peers, and all that they send is checked."""

import random
from pathlib import Path

import pytest

from peers.shared.tokenizer import have
from swarm.content.service import Fetcher, Kind
from swarm.data import tokenizer_files, tokenizers
from swarm.errors import PeerUnavailable
from swarm.machine.clock import SystemClock
from tests.content.lines import FakeLine
from tests.support.tokenizers import write_tokenizer


async def test_all_of_its_files_come(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "model" / "tokenizer.json", ["one", "two"])
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "model" / "added_tokens.json").write_text("")
    files, kept = tokenizer_files.read(Path(path)), tmp_path / "cache" / "kept"
    line = FakeLine(liar=lambda _: b"{}", honest=files.content)
    fetcher = Fetcher(line, Kind.TOKENIZER, line.donors, SystemClock(), random.Random(0))
    await have(files.digest, kept, fetcher)
    assert {file.name for file in kept.iterdir()} == files.contents.keys()
    assert tokenizers.load(str(kept)).identity == tokenizers.load(path).identity
    num_sent = line.num_sent["honest"]
    await have(files.digest, kept, fetcher)
    assert line.num_sent["honest"] == num_sent == 4


async def test_half_a_tokenizer_is_not_kept(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "model" / "tokenizer.json", ["one", "two"])
    files = tokenizer_files.read(tmp_path / "model")
    line = FakeLine(half=lambda sha256: files.list if sha256 == files.digest else None)
    fetcher = Fetcher(line, Kind.TOKENIZER, line.donors, SystemClock(), random.Random(0))
    with pytest.raises(PeerUnavailable):
        await have(files.digest, tmp_path / "kept", fetcher)
    assert not (tmp_path / "kept").exists()
