"""Where programs keep what they need again."""

import os
from pathlib import Path

import pytest

from peers.shared import process
from peers.shared.process import cache_folder


def test_keys_and_texts_are_kept_where_the_user_says_or_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/swarm")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/y")
    assert cache_folder() == Path("/home/y/.cache/swarm")


def test_without_a_home_the_user_has_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # As where HOME is not set and the user has no entry.
    with pytest.raises(ValueError, match="there is no home directory: say in XDG_CACHE_HOME"):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/swarm")


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*process.KEYS, "LD_PRELOAD"):
        # The key is set first, so that it is undone at the end, whatever is set meanwhile.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "line",
    [
        "HF_TOKEN=hf_abc=",
        "export HF_TOKEN = hf_abc=  # mine",
        'HF_TOKEN="hf_abc="',
        "  HF_TOKEN='hf_abc=' # mine",
        "# keys\n\nLD_PRELOAD=evil.so\nHF_TOKEN=hf_abc=\nnonsense",
    ],
)
def test_a_key_is_read_and_nothing_else(line: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(line + "\nWANDB_API_KEY=0123#4\n")
    process.read_dotenv(tmp_path / ".env")
    assert os.environ["HF_TOKEN"] == "hf_abc="
    assert os.environ["WANDB_API_KEY"] == "0123#4"
    assert "LD_PRELOAD" not in os.environ


def test_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "own")
    (tmp_path / ".env").write_text("HF_TOKEN=other\n")
    process.read_dotenv(tmp_path / ".env")
    assert os.environ["HF_TOKEN"] == "own"


def test_no_file_is_no_fault(tmp_path: Path) -> None:
    process.read_dotenv(tmp_path / ".env")
    process.read_dotenv(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    process.read_dotenv(tmp_path / "pipe")
    assert "HF_TOKEN" not in os.environ


@pytest.mark.parametrize("value", ["", "# none", '"secret', "se cret", '""', "gehe\u00efm"])
def test_a_bad_value_is_one_line_that_does_not_tell_it(value: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"A=1\nHF_TOKEN={value}\n")
    with pytest.raises(ValueError, match=r"\.env, line 2: HF_TOKEN has no key") as caught:
        process.read_dotenv(tmp_path / ".env")
    assert "cret" not in str(caught.value)
    assert "HF_TOKEN" not in os.environ


def test_a_file_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="it is not UTF-8 text"):
        process.read_dotenv(tmp_path / ".env")
