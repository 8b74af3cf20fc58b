"""Two laptops on one network, on which nobody types an address: a peer is found by what it announces there."""

import json
from pathlib import Path

import pytest

from peers.local.supervisor import Supervisor
from scripts.benches.shared.internet import Internet
from tests.support.nat_swarm import INTERNET, NatSwarm
from tests.support.swarm import whole_lines

pytestmark = [pytest.mark.e2e, pytest.mark.slow, *INTERNET]


def test_a_run_is_found_joined_trained_and_watched_without_an_address(
    internet: Internet, children: Supervisor, tmp_path: Path
) -> None:
    here, there = internet.public_host(), internet.public_host()
    swarm = NatSwarm(tmp_path, children, num_stages=1)
    nobody = swarm.start_on(there, "nobody", "status", "--lan")
    assert swarm.wait_for_end(nobody) != 0
    assert "no run was found in this network in 5 s" in whole_lines(nobody.log)[-1]
    for host in (here, there):
        swarm.start_peer_on(host, 0, found_by_lan=True)
    swarm.train_on(there, 2, where=["--lan"])
    for program, words in {
        "status": ["--lan", "--json"],
        "doctor": ["--lan", "--json"],
        "generate": ["--lan", "--prompt", "def ", "--max-tokens", "4"],
        "model": ["export", "--lan", "--output", str(tmp_path / "out")],
    }.items():
        child = swarm.start_on(there, program, program, *words)
        # This machine's disk or memory may not be enough for the doctor.
        assert swarm.wait_for_end(child) == 0 or program == "doctor", child.log.read_text()
    view, findings = (json.loads(whole_lines(tmp_path / "logs" / f"{name}.log")[-1]) for name in ("status", "doctor"))
    assert [peer["name"] for stage in view["stages"] for peer in stage["peers"]] == ["peer-1", "peer-2"]
    assert {each["what"]: each["state"] for each in findings["findings"]}["version"] == "fine"
    assert (tmp_path / "out" / "config.json").exists()
