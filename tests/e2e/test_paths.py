"""Real peers of a run whose stages have variants: four trainings that share one block."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from peers.local.supervisor import Child, Supervisor
from tests.support.swarm import RealPeer, RealSwarm, run, wait_until, whole_lines

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
PATHS = range(4)
SHARED = "1"
PATIENCE_SECONDS = 180.0


def _swarm(folder: Path, children: Supervisor) -> RealSwarm:
    """The preset shared-value with smaller sizes. No block may be in two states at one round, however busy the machine:
    a minority commits nothing."""
    stages = "num_stages = 3\nvariants = [4, 1, 4]\npaths = [[0, 0, 0], [1, 0, 1], [2, 0, 2], [3, 0, 3]]"
    texts = 'paths = ["stdlib:pydoc_data", "stdlib:encodings", "stdlib:asyncio", "stdlib:email"]'
    changes = {
        "num_layers = 2": "num_layers = 3", "num_stages = 2": stages, f'dataset = "{folder / "text.txt"}"': texts,
        "momentum = 0.0": 'momentum = 0.0\n\n[averaging]\nquorum = "majority"',
    }  # fmt: skip
    swarm = RealSwarm(folder, children, changes=changes)
    swarm.start_seconds = 180.0
    return swarm


def _launch(swarm: RealSwarm, path: int, *more: str) -> tuple[Child, Path]:
    folder = str(swarm.folder / f"checkpoints-{path}")
    return swarm.launch("all", "--path", str(path), "--checkpoint", folder, "--checkpoint-every", "1", *more)


def _rounds(swarm: RealSwarm) -> dict[str, dict[int, list[str]]]:
    """By block and round the digests of the state after it, one for each peer that was a member."""
    found: defaultdict[str, defaultdict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for log in swarm.events.iterdir():
        for event in map(json.loads, whole_lines(log)):
            if event["event"] == "state":
                found[event["block"]][event["round"]].append(event["digest"])
    return {block: dict(rounds) for block, rounds in found.items()}


def _num_members(swarm: RealSwarm) -> int:
    """How many peers had the newest round of the shared block in common."""
    return len(max(_rounds(swarm).get(SHARED, {0: []}).items())[1])


def test_three_of_four_trainings_go_on_while_one_is_killed_and_it_comes_back(
    tmp_path: Path, children: Supervisor
) -> None:
    swarm = _swarm(tmp_path, children)
    peers: list[RealPeer] = [swarm.arrived(*_launch(swarm, 0))]
    peers += [swarm.arrived(*started) for started in [_launch(swarm, path) for path in PATHS[1:]]]
    assert peers[3].ready["stages"] == ["0.3", 1, "2.3"]
    trainers = [swarm.start_trainer(f"path-{path}", "--paths", str(path), steps=10_000) for path in PATHS]
    for path in PATHS:
        swarm.wait_for_steps(f"path-{path}", 3, PATIENCE_SECONDS)

    swarm.kill(peers[3])
    children.kill9(trainers[3])
    for path in PATHS[:3]:
        swarm.wait_for_more(f"path-{path}", 4, PATIENCE_SECONDS)
    wait_until(lambda: _num_members(swarm) == 3, PATIENCE_SECONDS, "a round of the shared block among three")

    again = _launch(swarm, 3, "--identity", str(tmp_path / f"{peers[3].child.name}.pem"), "--resume",
                    str(tmp_path / "checkpoints-3"))  # fmt: skip
    back = swarm.arrived(*again)
    assert back.ready["peer_id"] == peers[3].ready["peer_id"]
    trainers[3] = swarm.start_trainer("path-3-again", "--paths", "3", steps=10_000)
    for name in ("path-3-again", "path-0", "path-1", "path-2"):
        swarm.wait_for_more(name, 3, PATIENCE_SECONDS)
    wait_until(lambda: _num_members(swarm) == 4, PATIENCE_SECONDS, "a round of the shared block among four")

    view = swarm.status()
    served = {(row["stage"], row.get("variant", 0)): {peer["name"] for peer in row["peers"]} for row in view["stages"]}
    names = {peer.child.name for peer in swarm.peers}
    assert served[1, 0] == names
    assert [len(served[stage, variant]) for stage in (0, 2) for variant in PATHS] == 8 * [1]
    assert {trainer["name"] for trainer in view["trainers"]} == {"path-0", "path-1", "path-2", "path-3-again"}

    for trainer in trainers:
        swarm.interrupt(trainer)
    swarm.assert_proven()
    rounds = _rounds(swarm)
    assert all(len(set(digests)) == 1 for digests in rounds[SHARED].values()), "one state at each round"
    assert len(rounds) == 9
    swarm.assert_no_tracebacks()


def test_peers_choose_their_variants_and_one_takes_over_from_the_last_of_a_block(
    tmp_path: Path, children: Supervisor
) -> None:
    """Nothing is learnt yet when that one dies: what has no peer and no checkpoint later is lost."""
    swarm = RealSwarm(tmp_path, children, changes={"num_stages = 2": "num_stages = 2\nvariants = [1, 2]"})
    swarm.start_seconds = PATIENCE_SECONDS
    for _ in range(3):
        swarm.start_peers(["auto"], "--rebalance-every", "4")
    last = [peer for peer in swarm.peers if "1.1" in peer.ready["stages"]]
    assert len(last) == 1
    assert {0, 1} <= {block for peer in swarm.peers for block in peer.ready["stages"]}
    swarm.kill(last[0])
    living = {peer.child.name for peer in swarm.peers} - {last[0].child.name}

    def served() -> set[str]:
        rows = [row for row in swarm.status()["stages"] if (row["stage"], row.get("variant", 0)) == (1, 1)]
        return {peer["name"] for row in rows for peer in row["peers"] if peer["state"] == "serving"} & living

    wait_until(served, PATIENCE_SECONDS, "another peer of block 1.1")
    trainer = swarm.start_trainer("trainer", steps=10_000)
    swarm.wait_for_steps("trainer", 3, PATIENCE_SECONDS)
    swarm.interrupt(trainer)
    swarm.assert_proven()
    swarm.assert_no_tracebacks()


def test_a_path_that_a_run_does_not_have_is_one_line(tmp_path: Path) -> None:
    result = run("peer", "--preset", "shared-value", "--path", "4")
    assert result.stderr.splitlines()[-1].endswith("--path 4 does not exist: this run has the paths 0 to 3")
