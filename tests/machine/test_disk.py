"""Files and folders that are made whole or not at all."""

import os
import threading
from pathlib import Path

import pytest

from swarm.machine.disk import whole_folder, write_private


def _fill(path: Path) -> None:
    with whole_folder(path) as folder:
        (folder / "weights").mkdir()
        (folder / "weights" / "a").write_text("1")
        (folder / "b").write_text("2")
        assert not (path / "b").exists()


def _files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*"))


def test_a_new_folder_is_filled(tmp_path: Path) -> None:
    _fill(tmp_path / "new" / "out")
    assert _files(tmp_path) == ["new", "new/out", "new/out/b", "new/out/weights", "new/out/weights/a"]


def test_an_empty_folder_stays_the_folder_that_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a mounted disk, which can be neither removed nor renamed over, or the current folder."""
    before = os.stat(tmp_path)
    monkeypatch.chdir(tmp_path)
    _fill(Path())
    assert _files(tmp_path) == ["b", "weights", "weights/a"]
    assert os.path.samestat(before, os.stat(tmp_path))


@pytest.mark.parametrize("is_there", [True, False])
def test_a_block_that_fails_leaves_nothing(is_there: bool, tmp_path: Path) -> None:
    path = tmp_path / "out"
    if is_there:
        path.mkdir()

    def fail() -> None:
        with whole_folder(path) as folder:
            (folder / "a").write_text("1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert _files(tmp_path) == ["out"] * is_there


def test_a_private_file_that_does_not_get_its_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    with pytest.raises(OSError, match="key"):
        write_private(tmp_path / "key", "secret")
    assert _files(tmp_path) == ["key"]


@pytest.mark.parametrize("is_there", [True, False])
def test_what_a_killed_process_left_is_cleared_away(is_there: bool, tmp_path: Path) -> None:
    path = tmp_path / "out"
    left = path / ".partial" if is_there else tmp_path / ".out.partial"
    left.mkdir(parents=True)
    (left / "old").write_text("0")
    _fill(path)
    assert _files(tmp_path) == ["out", "out/b", "out/weights", "out/weights/a"]


@pytest.mark.parametrize("is_there", [True, False])
def test_two_that_fill_one_folder_do_not_mix_their_files(is_there: bool, tmp_path: Path) -> None:
    path = tmp_path / "out"
    if is_there:
        path.mkdir()
    with whole_folder(path) as folder:
        (folder / "mine").write_text("1")
        with pytest.raises(ValueError, match="out is being written by another process"):
            _fill(path)
    assert _files(tmp_path) == ["out", "out/mine"]


def test_one_that_waits_finds_the_folder_of_the_other(tmp_path: Path) -> None:
    path, said = tmp_path / "out", list[str]()

    def wait() -> None:
        try:
            with whole_folder(path, waits=True):
                said.append("filled it again")
        except ValueError as error:
            said.append(str(error))

    with whole_folder(path) as folder:
        (folder / "mine").write_text("1")
        waiting = threading.Thread(target=wait)
        waiting.start()
    waiting.join()
    assert "is there already" in said[0]
    assert _files(tmp_path) == ["out", "out/mine"]
