"""A member whose answers others have computed again is left out of rounds and named, in a whole swarm."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.audit.audit import audit
from swarm.audit.history import read
from swarm.events import Checked, OutOfLine, Start
from swarm.stage.staging import Download
from tests.support.chain import SYNCHRONOUS
from tests.support.whole_swarm import WholePeer, whole_swarm

STEPS, MOST_STEPS = 3, 60
"""It is chance which answers are drawn, and at most one of a sender's is checked at a time."""
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


def _named(peers: Sequence[WholePeer]) -> set[str]:
    lines = [line for peer in peers if peer.server for line in peer.server.describe().averaging.refusals]
    return {line.partition(" lies: ")[0] for line in lines if " lies: " in line}


async def test_a_liar_is_left_out_and_named_at_once(tmp_path: Path) -> None:
    async with whole_swarm(CONFIG, tmp_path / "events", num_peers=(1, 1, 4)) as swarm:
        liar, *honest = [peer for peer in swarm.peers if peer.stage == 2]
        _lie(liar)
        for first in range(0, MOST_STEPS, STEPS):
            await swarm.train(STEPS, first=first)
            if named := _named(honest):
                break
    assert named == {liar.peer_id}
    logs = [[line.event for line in read(log)] for log in swarm.logs]
    # The liar finds all others wrong.
    events = [event for log in logs if not (isinstance(log[0], Start) and log[0].peer == liar.peer_id) for event in log]
    left_out = [event for event in events if isinstance(event, OutOfLine)]
    assert {event.peer for event in left_out} == {liar.peer_id}
    assert all(event.is_named for event in left_out)
    found = [event for event in events if isinstance(event, Checked) and event.verdict == "differs"]
    assert {event.peer for event in found} == {liar.peer_id}
    # What the liar had in the round was run again by others.
    report = audit(swarm.logs)
    assert report.findings.violations == []
    assert report.lost_share == 0.0
