"""Real peers that serve several stages each outlive a kill."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from peers.local.supervisor import Supervisor
from tests.support.swarm import RealSwarm, whole_lines

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]
THREE_STAGES = {
    "num_stages = 2": "num_stages = 3", "num_layers = 2": "num_layers = 3", "round_samples = 64": "round_samples = 32",
}  # fmt: skip


def _assert_one_state_for_each_round(swarm: RealSwarm) -> None:
    """At every stage all members had the same digest after a round, and the last stages had some rounds in common."""
    digests: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    num_members: defaultdict[tuple[str, int], int] = defaultdict(int)
    for log in swarm.events.iterdir():
        for event in map(json.loads, whole_lines(log)):
            if event["event"] == "state":
                digests[event["block"], event["round"]].add(event["digest"])
                num_members[event["block"], event["round"]] += 1
    assert {block for block, _ in digests} == {"0", "1", "2"}
    assert all(len(found) == 1 for found in digests.values()), digests
    assert max(num_members.values()) >= 3


def test_mixed_spans_outlive_the_kill_of_one_and_take_it_back(tmp_path: Path, children: Supervisor) -> None:
    swarm = RealSwarm(tmp_path, children, setting="synchronous", changes=THREE_STAGES)
    [everything] = swarm.start_peers(["all"])
    [first, second, *_] = swarm.start_peers(["0-1", "0-1", "2", "2"])
    assert everything.ready["stages"] == [0, 1, 2]
    assert first.ready["stages"] == [0, 1]
    trainer = swarm.start_trainer("trainer", steps=10_000)
    swarm.wait_for_steps("trainer", 4)
    swarm.kill(first)
    again = swarm.launch("0-1", "--identity", str(tmp_path / f"{first.child.name}.pem"))
    swarm.wait_for_more("trainer", 4)
    back = swarm.arrived(*again)
    assert back.ready["peer_id"] == first.ready["peer_id"]
    swarm.wait_for_more("trainer", 4)
    rows = swarm.status()["stages"]
    names = [{peer["name"] for peer in row["peers"] if peer["state"] == "serving"} for row in rows]
    assert names[0] == names[1] == {everything.child.name, second.child.name, back.child.name}
    swarm.kill(everything)
    swarm.wait_for_more("trainer", 4)
    swarm.interrupt(trainer)
    report = swarm.audit()
    assert report["proven"], report
    log = second.child.log.read_text()
    assert all(f"stage {stage}: round " in log for stage in (0, 1)), "lines of averaging name their stage"
    _assert_one_state_for_each_round(swarm)
    swarm.assert_no_tracebacks()
