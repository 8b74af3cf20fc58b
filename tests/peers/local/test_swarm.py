"""A local swarm whose child processes are only recorded: what it waits for, deletes and kills, and when it gives up."""

import asyncio
from pathlib import Path

import pytest

from peers.local import swarm as swarms
from peers.local.supervisor import Exit
from peers.local.swarm import Drama, LocalSwarm
from peers.status.live_table import LiveTable
from swarm import config as configs
from swarm.credentials.identity import generate
from swarm.errors import PeerUnavailable
from swarm.metrics import MetricsLog
from tests.peers.local.children import Children, serve, started_peers
from tests.support.chain import eventually


def _swarm(tmp_path: Path) -> tuple[LocalSwarm, Children]:
    options, peers, children = started_peers(tmp_path)
    return LocalSwarm(options, "tiny", peers, children, generate()), children


# -- kills and joins ---------------------------------------------------------------------------------------------------


def test_the_last_peer_of_a_stage_is_spared(tmp_path: Path) -> None:
    options, peers, children = started_peers(tmp_path, kill_at=0)
    for stage in (0, 1, 2):
        serve(peers.start(peers.spans[stage]))
    peers.start(peers.spans[0])
    drama = Drama(options, peers)
    assert drama.act(0) == []
    assert children.killed == []  # The second peer of stage 0 does not serve yet.
    serve(peers.running[-1])
    drama.act(0)
    drama.act(0)
    assert len(children.killed) == drama.num_killed == 1
    assert {peer.span for peer in peers.running} == {*peers.spans}


async def test_a_stage_that_has_lost_its_last_peer_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the trainer would wait for ever. A peer that is still starting counts, because it may serve in time."""
    monkeypatch.setattr(swarms, "LOOK_SECONDS", 0.01)
    swarm, children = _swarm(tmp_path)
    for stage in (0, 1, 2, 1):
        serve(swarm.peers.start(swarm.peers.spans[stage]))
    swarm.peers.start(swarm.peers.spans[1])
    trainer = swarm.start_trainer()
    names = [peer.child.name for peer in swarm.peers.running if peer.span == swarm.peers.spans[1]]
    reason = "swarm-peer: error: no memory"
    with LiveTable() as table, MetricsLog(swarm.output.metrics) as metrics:
        watching = asyncio.create_task(swarm.watch(trainer, table, metrics))
        for name in names[:-1]:
            children.ended.append(Exit(name=name, returncode=1, reason=reason))
            await asyncio.sleep(0.1)
            assert not watching.done()
        children.ended.append(Exit(name=names[-1], returncode=1, reason=reason))
        expected = f"^stage 1 has no peer left: {names[-1]} ended by itself: no memory; its log is .*{names[-1]}.log$"
        with pytest.raises(PeerUnavailable, match=expected):
            await asyncio.wait_for(watching, 10.0)


async def test_a_path_that_has_lost_its_last_peer_stands_still_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarms, "LOOK_SECONDS", 0.01)
    options, peers, children = started_peers(tmp_path, configs.load_preset("shared-value"))
    swarm = LocalSwarm(options, "shared", peers, children, generate())
    for span in peers.spans:
        serve(peers.start(span))
    trainer = swarm.start_trainer()

    def end(number: int) -> None:
        children.ended.append(Exit(name=f"peer-{number}", returncode=1, reason="swarm-peer: error: no memory"))

    def told() -> str:
        return swarm.output.metrics.read_text()

    with LiveTable() as table, MetricsLog(swarm.output.metrics) as metrics:
        watching = asyncio.create_task(swarm.watch(trainer, table, metrics))
        end(4)
        await eventually(lambda: "path 3 stands still, and others go on: stage 2.3 has no peer left: peer-4" in told())
        end(2)
        end(3)
        await eventually(lambda: "paths 1, 2, 3 stand still" in told())
        assert not watching.done()
        end(1)
        with pytest.raises(PeerUnavailable, match=r"^stage 2 has no peer left: peer-1 ended by itself: no memory"):
            await asyncio.wait_for(watching, 10.0)
