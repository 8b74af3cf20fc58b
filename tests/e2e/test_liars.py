"""A member of a real swarm lies about its round. The others keep their weights, go on, and log it."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.liar import ROUND
from tests.support.swarm import RealPeer, RealSwarm, real_swarm, wait_until

# A minute and a half; tests/averaging/test_liars.py has all that liars do, in one process.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]

STAGE = 1
"""Of the liars, and of three honest peers."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSwarm]:
    with real_swarm(tmp_path_factory.mktemp("liars")) as swarm:
        swarm.start_peers([0])
        swarm.start_peers([STAGE] * 2)
        swarm.start_peers([STAGE], "--checkpoint", str(swarm.folder / "checkpoints"), "--checkpoint-every", "1")
        swarm.start_trainer("trainer", steps=100_000)
        swarm.wait_for_steps("trainer", 2)
        yield swarm


def _start_liar(swarm: RealSwarm, anchor: str) -> RealPeer:
    name, ready = f"liar-{anchor}", swarm.folder / f"liar-{anchor}.json"
    arguments = [
        anchor, "--stage", str(STAGE), "--name", name, "--host", "127.0.0.1", "--device", "cpu", "--threads", "1",
        "--initial-peers", swarm.address, "--identity", str(swarm.folder / f"{name}.pem"), "--ready-file", str(ready),
    ]  # fmt: skip
    child = swarm.children.start(name, [sys.executable, "-m", "tests.support.liar", *arguments])
    wait_until(ready.exists, 60.0, f"{name} to serve; see {child.log}")
    return RealPeer(child=child, stage=STAGE, ready=json.loads(ready.read_text()))


def _rows(swarm: RealSwarm, names: set[str]) -> list[dict[str, Any]]:
    return [peer for row in swarm.status()["stages"] for peer in row["peers"] if peer["name"] in names]


def _newest(folder: Path) -> dict[str, torch.Tensor]:
    path = max(folder.glob("*.safetensors"), key=lambda path: int(path.name.split(".")[1].removeprefix("round-")))
    assert int(path.name.split(".")[1].removeprefix("round-")) < ROUND
    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors


@pytest.mark.parametrize("anchor", ["nan", "0.25"])
def test_three_members_keep_their_weights_and_go_on(swarm: RealSwarm, anchor: str) -> None:
    honest = {peer.child.name for peer in swarm.peers if peer.stage == STAGE}
    assert len(honest) == 3
    logs = [swarm.folder / "logs" / f"{name}.log" for name in honest]
    before = {row["name"]: row["round"] for row in _rows(swarm, honest)}
    liar = _start_liar(swarm, anchor)
    # The liar goes on alone with the microbatches that it is given, so its round may have grown by a few.
    lie = re.compile(rf"{liar.ready['peer_id']} says that it is at round {ROUND // 10}\d of another branch")

    def is_refused() -> bool:
        refusals = [row["refusals"] for row in _rows(swarm, honest)]
        return any(lie.match(line) for lines in refusals for line in lines)

    wait_until(is_refused, 30.0, "swarm-status to tell of the liar")
    assert any(lie.search(log.read_text()) for log in logs)

    at = {row["name"]: row["round"] for row in _rows(swarm, honest)}
    wait_until(
        lambda: all(row["round"] >= at[row["name"]] + 3 for row in _rows(swarm, honest)), 30.0, "three more rounds"
    )
    rows = _rows(swarm, honest)
    assert all(before[row["name"]] < row["round"] < ROUND for row in rows)
    assert {row["downloads"] for row in rows} == {0}
    for tensor in _newest(swarm.folder / "checkpoints").values():
        assert bool(tensor.isfinite().all())
        assert not bool((tensor == 0.25).all())
    swarm.children.kill9(liar.child)


def test_nothing_was_said_in_tracebacks(swarm: RealSwarm) -> None:
    for log in (swarm.folder / "logs").iterdir():
        assert log.name.startswith("liar") or "Traceback" not in log.read_text(), log
