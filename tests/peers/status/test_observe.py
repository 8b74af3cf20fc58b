"""What peers answer, and who is on the way from one stage to another, as people see it."""

import json
import math
from functools import partial
from typing import Any

from peers.status.observe import LONGEST_REFUSAL, MOST_REFUSALS, observe, with_moves
from peers.status.view import PeerRow, StageRow, SwarmView
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import ClaimRecord, ClaimState, PeerRecord, PeerState
from tests.support.chain import SYNCHRONOUS, running_chain

MOVER, OTHER = "a" * 40, "b" * 40


def _record(peer_id: str, stage: int, state: PeerState) -> PeerRecord:
    return PeerRecord(peer_id=peer_id, announced_at=1.0, stage=stage, endpoint="192.0.2.1:1", state=state)


def _claim(stage: int, from_stage: int | None, state: ClaimState = ClaimState.CONFIRMED) -> ClaimRecord:
    return ClaimRecord(
        peer_id=MOVER, name="mover", announced_at=1.0, stage=stage, from_stage=from_stage, state=state, claimed_at=1.0
    )


def _seen(
    claims: list[ClaimRecord], *rows: tuple[str, int, PeerState, str]
) -> dict[int, list[tuple[str, str, Any, Any]]]:
    """By stage: who is shown, as what, from where, to where. Rows: who, where, announced as, and what it answers."""
    records = {stage: [_record(p, s, state) for p, s, state, _ in rows if s == stage] for stage in range(3)}
    answers = [
        StageRow(
            stage=stage,
            peers=tuple(PeerRow(name=p[0], peer_id=p, state=says) for p, s, _, says in rows if s == stage),
        )
        for stage in range(3)
    ]
    shown = with_moves(answers, records, claims)
    return {
        row.stage: [(peer.name, peer.state, peer.moving_from, peer.moving_to) for peer in row.peers] for row in shown
    }


SERVES = (OTHER, 0, PeerState.SERVING, "serving")


def test_a_peer_that_drains_moves_to() -> None:
    seen = _seen([_claim(2, 0)], SERVES, (MOVER, 0, PeerState.LEAVING, "leaving"))
    assert seen == {0: [("b", "serving", None, None), ("a", "moving", None, 2)], 1: [], 2: []}


def test_a_peer_that_downloads_moves_from() -> None:
    seen = _seen([_claim(2, 0)], SERVES, (MOVER, 0, PeerState.LEAVING, "unreachable"))
    assert seen == {0: [("b", "serving", None, None)], 1: [], 2: [("mover", "moving", 0, None)]}


def test_a_peer_that_has_arrived_just_serves() -> None:
    arrived = (MOVER, 2, PeerState.SERVING, "serving")
    for claim in (_claim(2, 0), _claim(2, 0, ClaimState.WITHDRAWN)):
        seen = _seen([claim], SERVES, (MOVER, 0, PeerState.LEAVING, "unreachable"), arrived)
        assert seen == {0: [("b", "serving", None, None)], 1: [], 2: [("a", "serving", None, None)]}


def test_a_newcomer_joins() -> None:
    assert _seen([_claim(1, None)], SERVES)[1] == [("mover", "joining", None, None)]
    assert _seen([_claim(1, None, ClaimState.PENDING)], SERVES)[1] == []


def test_a_peer_that_left_for_good_or_died_stays_unreachable() -> None:
    assert _seen([], (OTHER, 0, PeerState.LEAVING, "unreachable"))[0] == [("b", "unreachable", None, None)]


def test_a_stage_that_everybody_leaves_is_empty_and_one_that_somebody_goes_to_is_not() -> None:
    rows = (
        StageRow(stage=0, peers=(PeerRow(name="a", peer_id="", state="moving", moving_to=1),)),
        StageRow(stage=1, peers=(PeerRow(name="b", peer_id="", state="moving", moving_from=0),)),
    )
    assert SwarmView(run="r", stages=rows).empty_stages == [0]


async def test_an_answer_that_makes_no_sense_is_none() -> None:
    """One peer's figures are not to keep those of all others from being shown."""
    async with running_chain(SYNCHRONOUS) as chain:
        answers = (("serving", 1.0), ("serving", math.nan), ("\x1b[2J", 1.0))
        for peer, (state, rate) in zip(chain.peers, answers, strict=True):
            answer = partial(pb.DescribeReply, peer_id=peer.peer_id, state=state, samples_per_second=rate)
            peer.servicer._describe = answer
        records = {stage: [peer.record] for stage, peer in enumerate(chain.peers)}
        seen = await observe(SYNCHRONOUS.run_id, records, (), chain.peers[0].channels)
    stages = json.loads(seen.to_json())["stages"]
    assert [row["peers"][0]["state"] for row in stages] == ["serving", "unreachable", "unreachable"]


async def test_a_peer_is_shown_under_the_name_and_id_that_it_announces() -> None:
    """An announcement is signed and checked; an answer may say anything."""
    async with running_chain(SYNCHRONOUS) as chain:
        peer = chain.peers[0]
        peer.servicer._describe = partial(pb.DescribeReply, peer_id="\x1b[2J", name="\x1b[31m", state="serving")
        seen = await observe(SYNCHRONOUS.run_id, {0: [peer.record]}, (), peer.channels)
    shown = seen.stages[0].peers[0]
    assert (shown.peer_id, shown.name, shown.state) == (peer.peer_id, peer.record.name, "serving")


async def test_whom_a_peer_does_not_follow_is_shown_without_control_characters() -> None:
    """The line quotes what another peer says of itself."""
    async with running_chain(SYNCHRONOUS) as chain:
        peer = chain.peers[0]
        lines = ["1a2b says \x1b[2J", "x" * 10_000, *("more" for _ in range(100))]
        counters = pb.AveragingCounters(refusals=lines)
        peer.servicer._describe = partial(pb.DescribeReply, state="serving", averaging=counters)
        seen = await observe(SYNCHRONOUS.run_id, {0: [peer.record]}, (), peer.channels)
    shown = json.loads(seen.to_json())["stages"][0]["peers"][0]["refusals"]
    assert shown[0] == "1a2b says ?[2J"
    assert (len(shown[1]), len(shown)) == (LONGEST_REFUSAL, MOST_REFUSALS)


async def test_how_late_a_peer_s_event_loop_was_is_shown() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        peer = chain.peers[0]
        peer.servicer._describe = partial(pb.DescribeReply, state="serving", loop_lag_seconds=0.75)
        seen = await observe(SYNCHRONOUS.run_id, {0: [peer.record]}, (), peer.channels)
    assert json.loads(seen.to_json())["stages"][0]["peers"][0]["loop_lag_seconds"] == 0.75


async def test_what_a_peer_computes_on_is_shown_whether_it_answers_or_not() -> None:
    """Older releases do not announce it."""
    async with running_chain(SYNCHRONOUS) as chain:
        for peer in chain.peers[:2]:
            peer.servicer._describe = partial(pb.DescribeReply, peer_id=peer.peer_id, state="serving")
        announced, older = chain.peers[0].record.model_copy(update={"device": "cuda:1"}), chain.peers[1].record
        silent = _record(OTHER, 2, PeerState.SERVING).model_copy(update={"device": "cpu"})
        records = {0: [announced], 1: [older], 2: [silent]}
        seen = await observe(SYNCHRONOUS.run_id, records, (), chain.peers[0].channels)
    shown = [(row["peers"][0]["state"], row["peers"][0]["device"]) for row in json.loads(seen.to_json())["stages"]]
    assert shown == [("serving", "cuda:1"), ("serving", ""), ("unreachable", "cpu")]
