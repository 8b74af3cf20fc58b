"""Two laptops on one network, on which nobody types an address: a peer is found by what it announces there."""

import json
from pathlib import Path

import pytest

from peers.commands import command_line
from peers.local.supervisor import Supervisor
from scripts.benches.shared.internet import Internet, missing
from tests.support.nat_swarm import NatSwarm
from tests.support.swarm import whole_lines

pytestmark = [
    pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=missing() or "everything is there"),
]  # fmt: skip


def test_a_run_is_found_joined_trained_and_watched_without_an_address(children: Supervisor, tmp_path: Path) -> None:
    with Internet() as internet:
        here, there = internet.public_host(), internet.public_host()
        swarm = NatSwarm(tmp_path, children, num_stages=1)
        nobody = children.start("nobody", there.command(command_line("status", ["--lan"])))
        assert swarm.wait_for_end(nobody) != 0
        assert "no run was found in this network in 5 s" in whole_lines(nobody.log)[-1]
        swarm.start_peer_on(here, 0, found_by_lan=True)
        swarm.start_peer_on(there, 0, found_by_lan=True)
        own = ["--lan", "--steps", "2", "--output", str(tmp_path / "trainer"), "--evaluate-every", "0"]
        own += ["--evaluation-samples", "16"]
        trainer = children.start("trainer", there.command(command_line("trainer", own)))
        assert swarm.wait_for_end(trainer) == 0
        status = children.start("status", there.command(command_line("status", ["--lan", "--json"])))
        assert swarm.wait_for_end(status) == 0
        view = json.loads(whole_lines(status.log)[-1])
        assert [peer["name"] for stage in view["stages"] for peer in stage["peers"]] == ["peer-1", "peer-2"]
        for program, words in {
            "doctor": ["--lan", "--json"],
            "generate": ["--lan", "--prompt", "def ", "--max-tokens", "4"],
            "model": ["export", "--lan", "--output", str(tmp_path / "out")],
        }.items():
            child = children.start(program, there.command(command_line(program, words)))
            # This machine's disk or memory may not be enough for the doctor.
            assert swarm.wait_for_end(child) == 0 or program == "doctor", child.log.read_text()
        findings = json.loads(whole_lines(tmp_path / "logs" / "doctor.log")[-1])["findings"]
        assert {finding["what"]: finding["state"] for finding in findings}["version"] == "fine"
        assert (tmp_path / "out" / "config.json").exists()
