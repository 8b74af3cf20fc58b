"""swarm-local's command line: what it refuses before it touches anything, and what scripts/demo makes of it."""

import subprocess
from pathlib import Path

import pytest

from peers.local import program as local
from peers.local.options import LocalOptions
from peers.shared import cli
from tests.peers.local.children import OLD, leave_old_files

DEMO = Path(__file__).parents[3] / "scripts" / "demo"


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ("--preset small --config x.toml", "--config, --preset and --model exclude each other"),
        (
            "--peers-per-stage 1 --kill-at 3 --join-at 4",
            "--kill-at needs --peers-per-stage 2 or more: a stage without a peer stops the run",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_touched(
    argv: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_old_files(tmp_path)
    with pytest.raises(SystemExit) as stop:
        local.main([*argv.split(), "--output", str(tmp_path)])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"swarm-local: error: {complaint} (see swarm-local --help)\n"
    assert all((tmp_path / name).exists() for name in OLD)


# -- scripts/demo ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "events"),
    [
        ("", "--kill-at 20 --join-at 30"),
        ("--peers-per-stage 1", "--join-at 30"),
        ("--steps many", ""),
    ],
)
def test_the_demo_adds_what_fits(argv: str, events: str, tmp_path: Path) -> None:
    for name, text in (("scripts/setup_venv", "true"), (".venv/bin/swarm-local", 'echo "$@"')):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    demo = tmp_path / "scripts" / "demo"
    demo.write_text(DEMO.read_text())
    output = subprocess.run(["bash", demo, *argv.split()], capture_output=True, text=True, timeout=30, check=True)
    words = ["--stages 3 --peers-per-stage 2 --steps 72 --output swarm-output", events, argv]
    assert output.stdout.split() == " ".join(words).split()
    if "many" not in argv:
        cli.parse(LocalOptions, prog="swarm-local", argv=output.stdout.split())
