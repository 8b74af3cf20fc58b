"""A member whose answers others have computed again is left out of rounds and named, in a whole swarm."""

import dataclasses
from pathlib import Path
from typing import Any

from swarm.audit.audit import audit
from swarm.audit.history import read
from swarm.events import Checked, OutOfLine
from swarm.stage.staging import Download
from tests.support.chain import SYNCHRONOUS
from tests.support.whole_swarm import WholePeer, whole_swarm

STEPS = 5
CONFIG = dataclasses.replace(SYNCHRONOUS, rounds=dataclasses.replace(SYNCHRONOUS.rounds, check_share=1.0))


def _lie(peer: WholePeer) -> None:
    """Let a peer answer the gradient with another sign."""
    assert peer.server is not None
    backend = peer.server.stage.context.backend
    true = backend.forward_loss

    def lying(*arguments: Any, **options: Any) -> Any:
        loss, gradient, accumulated = true(*arguments, **options)
        assert gradient is not None
        return loss, Download(-gradient.wait()), accumulated

    backend.forward_loss = lying  # type: ignore[method-assign]


async def test_a_liar_is_left_out_and_named_at_once(tmp_path: Path) -> None:
    async with whole_swarm(CONFIG, tmp_path / "events", num_peers=(1, 1, 4)) as swarm:
        liar, *honest = [peer for peer in swarm.peers if peer.stage == 2]
        _lie(liar)
        await swarm.train(STEPS)
        lines = [line for peer in honest if peer.server for line in peer.server.describe().averaging.refusals]
    named = {line.partition(" lies: ")[0] for line in lines if " lies: " in line}
    assert named == {liar.peer_id}
    events = [line.event for log in swarm.logs for line in read(log)]
    left_out = [event for event in events if isinstance(event, OutOfLine)]
    assert {event.peer for event in left_out} == {liar.peer_id}
    assert all(event.is_named for event in left_out)
    found = [event for event in events if isinstance(event, Checked) and event.verdict == "differs"]
    assert {event.peer for event in found} - {liar.peer_id} == set()
    # What the liar had in the round was run again by others.
    report = audit(swarm.logs)
    assert report.findings.violations == []
    assert report.lost_share == 0.0
