"""The view of a swarm: the answers of peers, and which peers are moving."""

import json
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import ANY

import pytest

from peers.status.answer import LONGEST_REFUSAL, MOST_REASONS, MOST_REFUSALS, LastPeer
from peers.status.lookout import observe, with_last_peers, with_moves
from peers.status.peer_row import PeerRow
from peers.status.view import StageRow
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import Block, ClaimRecord, ClaimState, PeerRecord, PeerState
from tests.support.describing import describing

RUN = "run"
MOVER, OTHER = "a" * 40, "b" * 40


def _record(peer_id: str, stage: int, state: PeerState) -> PeerRecord:
    return PeerRecord(peer_id=peer_id, announced_at=1.0, stage=stage, endpoint="127.0.0.1:1", state=state)


def _claim(stage: int, from_stage: int | None, state: ClaimState = ClaimState.CONFIRMED) -> ClaimRecord:
    return ClaimRecord(
        peer_id=MOVER, name="mover", announced_at=1.0, stage=stage, from_stage=from_stage, state=state, claimed_at=1.0
    )


def _seen(
    claims: list[ClaimRecord], *rows: tuple[str, int, PeerState, str]
) -> dict[int, list[tuple[str, str, Any, Any]]]:
    """By stage: name, state, from and to which stage. Rows: id, stage, announced state, and the state it answers."""
    records = {Block(stage): [_record(p, s, state) for p, s, state, _ in rows if s == stage] for stage in range(3)}
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


def test_a_peer_that_downloads_moves_from() -> None:
    seen = _seen([_claim(2, 0)], SERVES, (MOVER, 0, PeerState.LEAVING, "unreachable"))
    assert seen == {0: [("b", "serving", None, None)], 1: [], 2: [("mover", "moving", 0, None)]}


def test_a_newcomer_joins() -> None:
    assert _seen([_claim(1, None)], SERVES)[1] == [("mover", "joining", None, None)]
    assert _seen([_claim(1, None, ClaimState.PENDING)], SERVES)[1] == []


def test_a_peer_that_left_for_good_is_told_from_one_that_died() -> None:
    assert _seen([], (OTHER, 0, PeerState.LEAVING, "unreachable"))[0] == [("b", "leaving", None, None)]
    assert _seen([], (OTHER, 0, PeerState.SERVING, "unreachable"))[0] == [("b", "unreachable", None, None)]


async def _ask(replies: Sequence[pb.DescribeReply], *others: PeerRecord) -> list[dict[str, Any]]:
    """The JSON of peers of stages 0, 1, ... that answer this, and of others that are announced at stage 9."""
    return [peer for row in (await _rows(replies, *others)) for peer in row["peers"]]


async def _rows(replies: Sequence[pb.DescribeReply], *others: PeerRecord) -> list[dict[str, Any]]:
    """The JSON of these stages."""
    async with AsyncExitStack() as stack:
        channels = ChannelPool(insecure=True)
        stack.push_async_callback(channels.close)
        records: dict[Block, list[PeerRecord]] = {Block(9): list(others)}
        for stage, reply in enumerate(replies):
            reply.run_id, reply.stage = RUN, stage
            records[Block(stage)] = [await stack.enter_async_context(describing(stage, lambda _, reply=reply: reply))]  # type: ignore[misc]
        seen = await observe(RUN, records, (), channels)
    rows: list[dict[str, Any]] = json.loads(seen.to_json())["stages"]
    return rows


def _last(name: str, last_at: float, *, has_left: bool = False) -> LastPeer:
    return LastPeer(name=name, last_at=last_at, has_left=has_left)


def test_of_a_stage_that_is_not_announced_any_more_the_others_tell_and_a_single_liar_does_not_count() -> None:
    told = [{Block(1): _last("gpu-2", 60.0)}, {Block(1): _last("liar", 4e9)}, {}, {Block(1): _last("gpu-2", 60.5)}]
    (row,) = with_last_peers([StageRow(stage=1)], {Block(1): []}, told)
    assert row.last_peer == _last("gpu-2", 60.5)
    (row,) = with_last_peers([StageRow(stage=1)], {Block(1): []}, [{Block(2): _last("gpu-3", 60.0)}])
    assert row.last_peer is None


async def test_what_peers_tell_of_the_last_one_of_a_stage_is_bounded_text() -> None:
    told = pb.LastPeer(stage=9, name="\x1b[2J" * 100, last_at=60.0, has_left=True)
    rows = await _rows([pb.DescribeReply(state="serving", last_peers=[told])])
    last = rows[1]["last_peer"]
    assert (last["last_at"], last["has_left"], len(last["name"])) == (60.0, True, 64)
    assert "\x1b" not in last["name"]


async def test_an_answer_that_makes_no_sense_is_none() -> None:
    """One peer's figures must not keep those of all others from being shown."""
    answers = (("serving", 1.0), ("serving", math.nan), ("\x1b[2J", 1.0))
    shown = await _ask([pb.DescribeReply(state=state, samples_per_second=rate) for state, rate in answers])
    assert [peer["state"] for peer in shown] == ["serving", "unreachable", "unreachable"]


async def test_what_a_peer_tells_of_its_waits_and_lines_is_bounded_text_and_figures() -> None:
    honest = pb.DescribeReply(
        state="serving",
        waiting_for="stage 2 (it has no peer) (12 s)",
        links=[pb.Link(peer_id=OTHER, round_trip_seconds=0.25, bytes_per_second=1e6)],
    )
    liar = pb.DescribeReply(
        state="serving", waiting_for="\x1b[2J" * 1000, links=[pb.Link(peer_id="\x1b[2J" * 1000)] * 1000
    )
    nonsense = pb.DescribeReply(state="serving", links=[pb.Link(round_trip_seconds=math.nan)])
    first, second, third = await _ask([honest, liar, nonsense])
    assert first["waiting_for"] == "stage 2 (it has no peer) (12 s)"
    assert first["links"] == [{"peer_id": OTHER, "round_trip_seconds": 0.25, "bytes_per_second": 1e6}]
    assert (len(second["waiting_for"]), len(second["links"]), len(second["links"][0]["peer_id"])) == (200, 16, 64)
    assert "\x1b" not in str(second)
    assert third["state"] == "unreachable"


async def test_of_a_peers_failed_attempts_the_most_frequent_reasons_are_shown() -> None:
    told = {"slow": 9, "\x1b[2J" * 1000: 8} | {f"reason {number}": 1 for number in range(1000)}
    (shown,) = await _ask([pb.DescribeReply(state="serving", averaging=pb.AveragingCounters(aborted=told))])
    first, second, *others = shown["aborted"].items()
    assert (first, second[1], len(others)) == (("slow", 9), 8, MOST_REASONS - 2)
    assert second[0] == (" [2J" * 1000)[:LONGEST_REFUSAL]


async def test_a_peer_is_shown_under_the_name_and_id_that_it_announces() -> None:
    """An announcement is signed and checked; an answer may say anything."""
    (shown,) = await _ask([pb.DescribeReply(peer_id="\x1b[2J", name="\x1b[31m", state="serving")])
    assert (shown["peer_id"], shown["name"], shown["state"]) == (f"{0:040x}", "peer of stage 0", "serving")


async def test_whom_a_peer_does_not_follow_is_shown_without_control_characters() -> None:
    """The line quotes what another peer says of itself."""
    lines = ["1a2b says \x1b[2J", "x" * 10_000, *("more" for _ in range(100))]
    (shown,) = await _ask([pb.DescribeReply(state="serving", averaging=pb.AveragingCounters(refusals=lines))])
    assert shown["refusals"][0] == "1a2b says  [2J"
    assert (len(shown["refusals"][1]), len(shown["refusals"])) == (LONGEST_REFUSAL, MOST_REFUSALS)


async def test_every_figure_is_read_from_its_own_field() -> None:
    inner = pb.InnerSteps(count=2, samples=34, configured_samples=16, microbatches=4, staleness=6, largest_staleness=3)
    last = pb.RoundReport(
        num_alive=9, num_members=8, averaged_fraction=0.5, bytes_sent=100, bytes_received=20, compression_ratio=4.5,
        exchange_seconds=1.5, wait_seconds=2.5, contribution_norm=3.5, inner_steps=inner, round=20, contributed=True,
    )  # fmt: skip
    reply = pb.DescribeReply(
        state="leaving", samples_per_second=1.25, queue_length=2, round=3, round_samples=4, loop_lag_seconds=0.75,
        protocol_version=27, counters=pb.StageCounters(forwards=5, backwards=6, rerouted_backwards=7, committed=16),
        averaging=pb.AveragingCounters(
            attempts=10, aborted={"silent": 11}, downloads=12, refusals=["a line"], exchanged_bytes=17
        ),
        rounds=[pb.RoundReport(num_members=99, round=18, contributed=True), pb.RoundReport(round=19), last],
        generation=pb.GenerationCounters(sessions=13, tokens=14, rounds=15), waiting_for="round 3",
        links=[pb.Link(peer_id=OTHER, round_trip_seconds=4.5, bytes_per_second=5.5)],
        lines=pb.Lines(is_hidden=True, punched=21, relayed=22, waiting=23, carried=24, carried_bytes=25),
        time_shares=pb.TimeShares(
            computing=0.25, waiting_for_input=0.5, waiting_for_room=0.125, averaging=0.0625, flops_per_second=26.0,
            utilisation=0.75,
        ),
    )  # fmt: skip
    (shown,) = await _ask([reply])
    assert shown == {
        "name": "peer of stage 0", "peer_id": f"{0:040x}", "state": "leaving", "moving_from": None, "moving_to": None,
        "moves": 0, "started_at": 0.0, "device": "", "protocol": 27, "reached": "punched", "punched_connections": 21,
        "relayed_connections": 22, "waiting_peers": 23, "carried_connections": 24, "carried_bytes": 25,
        "computing_share": 0.25, "input_wait_share": 0.5, "room_wait_share": 0.125, "averaging_share": 0.0625,
        "flops_utilisation": 0.75, "idle_because": ANY,
        "samples_per_second": 1.25, "queue_length": 2, "round": 3, "samples": 4, "forwards": 5, "backwards": 6,
        "committed": 16, "rerouted_backwards": 7, "sessions": 13, "generated_tokens": 14, "held_rounds": 15,
        "alive_peers": 9, "members": 8, "recent_rounds": [18, 20],
        "averaged_fraction": 0.5, "averaged_bytes": 120, "exchanged_bytes": 17, "compression_ratio": 4.5,
        "exchange_seconds": 1.5, "wait_seconds": 2.5, "contribution_norm": 3.5, "attempts": 10,
        "aborted": {"silent": 11}, "downloads": 12, "inner_steps": 2, "samples_per_inner_step": 17.0,
        "configured_samples_per_inner_step": 16, "staleness": 1.5, "largest_staleness": 3, "loop_lag_seconds": 0.75,
        "refusals": ["a line"], "waiting_for": "round 3", "bans": [],
        "links": [{"peer_id": OTHER, "round_trip_seconds": 4.5, "bytes_per_second": 5.5}],
    }  # fmt: skip


@pytest.mark.parametrize(("run_id", "state"), [("", "serving"), (RUN, "serving"), ("another", "unreachable")])
async def test_only_a_peer_of_the_run_that_is_asked_for_is_shown(run_id: str, state: str) -> None:
    """swarm-local knows only the name of its run, so it accepts peers of any run."""
    channels = ChannelPool(insecure=True)
    async with describing(0, lambda _: pb.DescribeReply(run_id=RUN, state="serving")) as record:
        seen = await observe(run_id, {Block(0): [record]}, (), channels)
    await channels.close()
    assert seen.stages[0].peers[0].state == state


async def test_of_many_peers_some_are_asked_and_the_others_shown_as_they_announce_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("peers.status.lookout.MOST_ASKED", 1)
    records = {Block(0): [_record(OTHER, 0, PeerState.SERVING), _record(MOVER, 0, PeerState.SERVING)]}
    channels = ChannelPool(insecure=True)
    try:
        some, all_ = [await observe(RUN, records, (), channels, asks_all=asks_all) for asks_all in (False, True)]
    finally:
        await channels.close()
    (row,) = some.stages
    assert [(peer.peer_id, peer.state) for peer in row.peers] == [(MOVER, "unreachable"), (OTHER, "serving")]
    assert row.num_asked == 1
    (line,) = some.left_out
    assert line.startswith("stage 0: 2 peers are announced; 1 of them were asked")
    assert ({peer.state for peer in all_.peers}, all_.left_out) == ({"unreachable"}, [])
