"""A peer's key files copied to another place, as with a disk image: the copy is refused, and its original goes on."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.local.supervisor import Child
from tests.support.swarm import RealPeer, RealSwarm, real_swarm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSwarm]:
    with real_swarm(tmp_path_factory.mktemp("copied")) as swarm:
        swarm.start_peers([0])
        swarm.start_peers([1])
        yield swarm


def _start_copy(swarm: RealSwarm, of: RealPeer, folder: Path) -> tuple[Child, Path]:
    """Start a peer with a copy of another peer's key files."""
    folder.mkdir(exist_ok=True)
    for ending in ("pem", "p2p"):
        shutil.copy(swarm.folder / f"{of.child.name}.{ending}", folder)
    identity = folder / f"{of.child.name}.pem"
    return swarm.launch(of.stage, "--identity", str(identity))


def test_a_copy_is_refused_by_name_and_the_original_goes_on(swarm: RealSwarm, tmp_path: Path) -> None:
    original = swarm.peers[1]
    trainer = swarm.start_trainer("beside-a-copy", steps=1000)
    swarm.wait_for_steps("beside-a-copy", 2)
    copy, ready = _start_copy(swarm, original, tmp_path / "elsewhere")
    assert swarm.wait_for_end(copy, 60.0) != 0
    lines = copy.log.read_text().splitlines()
    assert f"another process serves under this identity at {original.ready['endpoint']} since " in lines[-1]
    assert "start-over" not in copy.log.read_text()
    assert not ready.exists()
    swarm.wait_for_more("beside-a-copy", 3)
    swarm.children.kill9(trainer)
    view = swarm.status()
    assert [peer["peer_id"] for peer in view["stages"][1]["peers"]] == [original.ready["peer_id"]]


@pytest.mark.slow
def test_so_is_one_that_enters_by_the_address_that_it_has_itself(swarm: RealSwarm, tmp_path: Path) -> None:
    original = swarm.peers[0]
    copy, _ = _start_copy(swarm, original, tmp_path / "elsewhere")
    assert swarm.wait_for_end(copy, 60.0) != 0
    *_, line = copy.log.read_text().splitlines()
    assert "that is this peer's own address: two peers cannot share one identity file" in line
