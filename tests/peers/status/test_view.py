"""The records people see, and their JSON."""

import json

import pytest

from peers.status.answer import idle_because
from peers.status.peer_row import PeerRow
from peers.status.view import StageRow, SwarmView, TrainerRow
from swarm.rpc.v1 import stage_pb2 as pb


def test_a_stage_is_empty_without_a_peer_that_serves_or_joins() -> None:
    def stage(number: int, *states: str) -> StageRow:
        return StageRow(stage=number, peers=tuple(PeerRow(name="p", peer_id="", state=state) for state in states))

    view = SwarmView(
        run="r", stages=(stage(0), stage(1, "joining"), stage(2, "leaving"), stage(3, "leaving", "serving"))
    )
    assert (view.empty_stages, view.silent_stages) == ([0, 2], {})


def test_a_stage_whose_peers_do_not_answer_is_not_empty() -> None:
    def stage(number: int, *states: str) -> StageRow:
        peers = (PeerRow(name=f"p{n}", peer_id="", state=state) for n, state in enumerate(states))
        return StageRow(stage=number, peers=tuple(peers))

    view = SwarmView(
        run="r",
        stages=(
            stage(0, "unreachable", "serving"), stage(1, "unreachable", "leaving", "unreachable"),
            stage(2, "unreachable", "moving"), stage(3),
        ),
    )  # fmt: skip
    assert view.silent_stages == {1: ["p0", "p2"]}
    assert view.empty_stages == [3]
    document = json.loads(view.to_json())
    assert (document["empty_stages"], document["silent_stages"]) == ([3], [1])


def test_json_has_every_field() -> None:
    peer = PeerRow(name="p", peer_id="ab", state="serving", rerouted_backwards=3)
    view = SwarmView(
        run="r", stages=(StageRow(stage=0, peers=(peer,)),), trainers=(TrainerRow(name="t"),), events=("x",)
    )
    document = json.loads(view.to_json())
    assert document["stages"][0]["peers"][0]["rerouted_backwards"] == 3
    assert document["trainers"] == [{"name": "t", "step": 0, "loss": None, "tokens_per_second": 0.0, "bans": []}]
    assert document["events"] == ["x"]
    assert document["empty_stages"] == []


@pytest.mark.parametrize(
    ("shares", "line"),
    [
        ({"computing": 0.24, "waiting_for_input": 0.7}, "busy for 24% of the time, and waits for input for 70%; what "),
        ({"computing": 0.1, "waiting_for_room": 0.9}, "busy for 10% of the time, and waits for room at the next stage"),
        ({"computing": 0.1, "averaging": 0.5}, "busy for 10% of the time, and averages for 50%; what helps: longer "),
        ({"computing": 0.34, "waiting_for_input": 0.66}, ""),
        ({}, ""),
    ],
)
def test_a_peer_with_little_to_do_says_why(shares: dict[str, float], line: str) -> None:
    because = idle_because(pb.TimeShares(**shares))
    assert because.startswith(line)
    view = SwarmView(
        run="r",
        stages=(
            StageRow(
                stage=0,
                peers=tuple(
                    PeerRow(name=name, peer_id=name, computing_share=share, idle_because=because)
                    for name, share in (("p", 0.3), ("q", 0.1))
                ),
            ),
        ),
    )
    assert view.waits == ([f"q is {because} (1 other too)"] if line else [])
    empty = StageRow(stage=1, peers=())
    assert SwarmView(run="r", stages=(*view.stages, empty)).waits == []
