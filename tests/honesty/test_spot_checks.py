"""A member whose answers others have computed again is left out of rounds and named, in a whole swarm; and one that
leaves its answers unsigned gets no more work."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.audit.audit import audit
from swarm.audit.history import read
from swarm.config import RoundsConfig, RunConfig
from swarm.events import Checked, OutOfLine, Start
from swarm.hop.answers import HopReply
from swarm.hop.spot_checks import SIGNING_PROTOCOL, SpotChecks
from swarm.machine.clock import SystemClock
from swarm.routing.router import Router
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.stage.staging import Download
from swarm.training.samples import Microbatch
from swarm.types import Block, PeerId, PeerRecord, PeerState
from tests.support.chain import DILOCO, SYNCHRONOUS
from tests.support.whole_swarm import WholePeer, whole_swarm

STEPS, MOST_STEPS = 3, 60
"""It is chance which answers are drawn, and at most one of a sender's is checked at a time."""
CONFIG = dataclasses.replace(SYNCHRONOUS, rounds=dataclasses.replace(SYNCHRONOUS.rounds, check_share=1.0))
DRIFTING = dataclasses.replace(
    DILOCO, rounds=RoundsConfig(setting="diloco", round_samples=32, inner_batch_samples=2, check_share=1.0),
    optimizer=dataclasses.replace(DILOCO.optimizer, learning_rate=1e-3),
)  # fmt: skip


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


@pytest.mark.parametrize(
    "config", [CONFIG, pytest.param(DRIFTING, marks=pytest.mark.slow)], ids=["synchronous", "diloco"]
)
async def test_a_liar_is_left_out_and_named_at_once(config: RunConfig, tmp_path: Path) -> None:
    async with whole_swarm(config, tmp_path / "events", num_peers=(1, 1, 4)) as swarm:
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
    assert report.lost_share == 0.0 or not config.rounds.synchronous


# -- answers that are left unsigned ------------------------------------------------------------------------------------

BLOCK, HONEST, OTHER = Block(1), PeerId("a" * 40), PeerId("b" * 40)


@pytest.mark.parametrize(
    ("honest_signs", "unsigned_every", "protocol", "is_found"),
    [
        (True, 1, SIGNING_PROTOCOL, True),
        (True, 2, SIGNING_PROTOCOL, True),
        (True, 20, SIGNING_PROTOCOL, False),
        (True, 1, SIGNING_PROTOCOL - 1, False),
        (False, 1, SIGNING_PROTOCOL, False),
    ],
    ids=["never signs", "signs half", "an ack was lost", "of the last release", "nobody signs"],
)
def test_who_leaves_answers_unsigned_while_others_sign_theirs_gets_no_more_work(
    *, honest_signs: bool, unsigned_every: int, protocol: int, is_found: bool
) -> None:
    router = Router(SystemClock(), random.Random(0))
    router.update(
        BLOCK,
        [
            PeerRecord(
                peer_id=peer, stage=1, announced_at=0.0, state=PeerState.SERVING, endpoint="127.0.0.1:1",
                protocol_version=protocol, oldest_protocol=protocol,
            )
            for peer in (HONEST, OTHER)
        ],
    )  # fmt: skip
    rng = cast("random.Random", SimpleNamespace(random=lambda: 1.0))  # Nothing is drawn.
    checks = SpotChecks(run_id="", block=BLOCK, share=0.1, router=router, stub=lambda record: None, rng=rng)
    for index in range(400):
        is_other = index % 2 == 1
        is_signed = index // 2 % unsigned_every > 0 if is_other else honest_signs
        peer, call = OTHER if is_other else HONEST, cast("Any", None)
        reply = HopReply(loss=1.0, tensors={}, route={BLOCK: peer}, num_reroutes=0, num_busy=0, _call=call)
        microbatch = Microbatch(index=index, round=index // 100, num_samples=1)
        checks.acknowledged(microbatch, {}, reply, pb.Statement() if is_signed else None)
    assert router.banned(BLOCK) == ({OTHER} if is_found else set())
