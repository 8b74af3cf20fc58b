"""Where programs keep what they need again."""

import os
from pathlib import Path

import pytest

from peers.shared.cache import cache_folder


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
