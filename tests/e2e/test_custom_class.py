"""A run whose model is a class of its own: a joiner imports nothing that its user has not named."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.commands import command_line
from tests.support.swarm import RealSwarm, real_swarm, run_all, wait_until, whole_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

OWN_MODEL = """
import os
from swarm.model.stage_module import StageModule

class Model(StageModule):
    pass

with open(os.environ["IMPORTED"], "a") as file:
    file.write("imported\\n")
"""


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """The file to which the module adds a line whenever it is imported."""
    return tmp_path / "imported"


@pytest.fixture
def swarm(tmp_path: Path, imported: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealSwarm]:
    (tmp_path / "own_model.py").write_text(OWN_MODEL, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("IMPORTED", str(imported))
    with real_swarm(tmp_path, changes={"[model]": '[model]\ncustom_class = "own_model:Model"'}) as swarm:
        swarm.start_peers([0])
        yield swarm


@pytest.mark.slow
def test_a_joiner_imports_what_its_user_named_and_nothing_else(swarm: RealSwarm, imported: Path) -> None:
    assert imported.read_text().count("imported") == 1, "whoever has the configuration needs no option"
    own = ["--host", "127.0.0.1", "--threads", "1", "--identity", str(swarm.folder / "second.pem")]
    refused = ["--stage", "1", "--initial-peers", swarm.address, "--host", "127.0.0.1", "--threads", "1"]
    others = [["--allow-class", "own_model:Other"], []]
    keys = (str(swarm.folder / f"{number}.pem") for number in range(2))
    for result in run_all(
        *(["peer", *refused, "--identity", key, *more] for key, more in zip(keys, others, strict=True))
    ):
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert result.stderr.endswith("if you trust that code, add --allow-class own_model:Model\n")
    assert imported.read_text().count("imported") == 1

    log = whole_lines(swarm.folder / "logs" / "peer-1.log")
    printed = next(line for line in log if line.strip().startswith("join:"))
    line = ["1" if word == "N" else word for word in shlex.split(printed)[2:]]
    ready = swarm.folder / "second.json"
    second = swarm.children.start("second", command_line("peer", [*line, *own, "--ready-file", str(ready)]))
    wait_until(ready.exists, 60.0, f"the second peer to serve; see {second.log}")
    assert imported.read_text().count("imported") == 2
    trainer = swarm.start_trainer("trainer", steps=2)
    assert swarm.wait_for_end(trainer) == 0
    assert imported.read_text().count("imported") == 2, "a trainer holds no parameters"
