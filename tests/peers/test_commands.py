"""Programs import what is theirs, and print what they should, before they load large libraries."""

import json
import subprocess
import sys
from pathlib import Path

from peers import commands


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
