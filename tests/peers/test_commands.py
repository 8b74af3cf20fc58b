"""Every program has an entry point, other processes can start it, and its modules are excluded from garbage
collection."""

import gc
import io
import json
import os
import subprocess
import sys
import threading
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from peers import commands


def test_every_script_has_its_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"]
    for entry_point in project["scripts"].values():
        module, name = entry_point.split(":")
        assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize(("given", "policy"), [(None, "passive"), ("active", "active")])
def test_threads_of_static_training_sleep_while_they_wait_unless_the_user_wants_otherwise(
    given: str | None, policy: str
) -> None:
    program = "import atexit, os; atexit.register(lambda: print(os.environ['OMP_WAIT_POLICY'])); "
    program += "from peers.commands import static; static()"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    said = subprocess.check_output([sys.executable, "-c", program, "--help"], env=environment, text=True)
    assert said.splitlines()[-1] == policy


def test_what_a_program_imports_is_never_looked_at_by_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> ModuleType:
        assert not gc.isenabled()
        return ModuleType(name)

    monkeypatch.setattr(commands, "import_module", load)
    before = gc.get_freeze_count()
    try:
        assert commands.load("x").__name__ == "x"
        assert gc.get_freeze_count() > before
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError):
        commands.load("peers.no_such_program")
    assert gc.isenabled()


class _Screen(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal
        self.was_told = threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.was_told.set()
        return super().write(text)


def test_somebody_who_watches_is_told_of_libraries_that_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", screen := _Screen(is_terminal=True))
    with commands.said_if_slow("swarm-peer"):
        assert screen.was_told.wait(30.0)
    assert screen.getvalue().startswith("swarm-peer: loading its libraries")


def test_a_log_is_not_told_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", log := _Screen(is_terminal=False))
    before = threading.active_count()
    with commands.said_if_slow("swarm-peer"):
        assert threading.active_count() == before
    assert not log.getvalue()


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "swarm").mkdir()
    for name in ("swarm/__init__.py", "random.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong one')\n")
    program = subprocess.run(
        commands.command_line("keys", ["--help"]), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert program.returncode == 0, program.stderr


def test_help_and_what_is_wrong_with_a_line_are_all_that_is_printed_and_need_no_large_library() -> None:
    script = """
import contextlib, io, json, sys
from peers import commands
for program in ("peer", "trainer", "status", "keys", "meet", "local", "doctor", "dashboard", "generate", "model"):
    said = []
    for word, code in (("--presets", 2), ("--help", 0)):
        sys.argv = ["x", word]
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
            try:
                getattr(commands, program)()
            except SystemExit as ended:
                assert ended.code == code, (program, word, ended.code)
        said += [errors.getvalue(), out.getvalue()]
    assert not {"torch", "hivemind"} & sys.modules.keys(), f"these take seconds: {program}"
    print(json.dumps([program, *said]))
"""
    run = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for line in done.stdout.splitlines():
        program, fault, nothing, no_fault, about = json.loads(line)
        assert fault.startswith(f"swarm-{program}: error: ")
        assert (fault.count("\n"), nothing, no_fault) == (1, "", "")
        assert f"swarm-{program}" in about.splitlines()[0]
