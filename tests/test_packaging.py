"""The wheel has all that it needs and nothing else, and installs where nobody pinned anything."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.13")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what is committed or would be, in a copy: a build leaves folders behind. It downloads nothing."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in _listed(()):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    how = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built)]
    _run([sys.executable, "-m", "pip", "wheel", *how, str(source)])
    [path] = built.glob("*.whl")
    return path


def _listed(folders: Sequence[str]) -> list[str]:
    """Files of the project, ignored ones left out, that are there."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    names = _run(command, cwd=ROOT).splitlines()
    return [name for name in dict.fromkeys(names) if (ROOT / name).is_file()]


def _run(command: Sequence[str], *, cwd: Path | None = None, seconds: float = 900.0) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    result = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == set(_listed(("swarm", "peers")))


def _python(version: str) -> str:
    """An interpreter of this version; skips where there is none."""
    managed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    found = str(managed[-1]) if managed else shutil.which(f"python{version}")
    if found is None:
        pytest.skip(f"there is no Python {version}")
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", PYTHONS)
def test_the_newest_versions_that_resolve_train(wheel: Path, version: str, tmp_path: Path) -> None:
    """They do so in an environment of its own, and in a folder that has nothing to do with the project.

    PyTorch is named with the version that is pinned, since which build of it a machine wants is its user's choice.
    """
    _run([_python(version), "-m", "venv", str(tmp_path / "venv")])
    programs = tmp_path / "venv" / "bin"
    [torch] = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    _run([str(programs / "python"), "-m", "pip", "install", "--quiet", "--no-compile", torch, str(wheel)], cwd=tmp_path)
    _run([str(programs / "python"), "-m", "pip", "check"], cwd=tmp_path)
    arguments = ["--steps", "3", "--peers-per-stage", "1", "--sample-tokens", "0"]
    _run([str(programs / "swarm-local"), *arguments], cwd=tmp_path)
    assert (tmp_path / "swarm-output" / "summary.json").is_file()
