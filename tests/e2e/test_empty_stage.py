"""All peers of a stage have died. Others name the stage and wait for it, and it begins anew if a user asks for that.

It takes twenty seconds until dead peers are no longer announced.
"""

from pathlib import Path

import pytest

from peers.local.supervisor import Supervisor
from tests.support.swarm import RealSwarm, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]


def test_an_empty_stage_is_named_and_waited_for(children: Supervisor, tmp_path: Path) -> None:
    swarm = RealSwarm(tmp_path, children)
    swarm.start_peers([0])
    swarm.start_peers([1, 1])
    trainer = swarm.start_trainer("waiting", steps=1000)
    swarm.wait_for_steps("waiting", 3)
    for peer in [peer for peer in swarm.peers if peer.stage == 1]:
        swarm.kill(peer)
    log = swarm.folder / "logs" / "waiting.log"
    # The newcomer also waits, because the stage's peers may come back.
    patient, _ = swarm.launch(1)
    wait_until(lambda: "stage 1 has no peer" in log.read_text(), 30.0, "the trainer to name the empty stage")
    wait_until(lambda: "stage 1 was held by" in patient.log.read_text(), 30.0, "a joiner to say for whom it waits")
    children.kill9(patient)
    swarm.start_peers([1, 1], "--start-over")
    swarm.wait_for_more("waiting", 5)
    swarm.interrupt(trainer)
    assert "stopped at step" in log.read_text()
    report = swarm.audit()
    assert (report["violations"], report["duplicates"]) == ([], 0)
    # Stage 1 lost all its peers, and with them all that it had learnt.
    assert report["stages"][0]["lost"] == 0
    assert report["stages"][1]["lost"] > 0
    swarm.assert_no_tracebacks()
