"""The records people see, and their JSON."""

import dataclasses
import json

import pytest

from peers.shared import cli
from peers.shared.network import entries_of
from peers.shared.option_types import StageChoice
from peers.stage_peer.options import PeerOptions
from peers.status.answer import idle_because
from peers.status.peer_row import PeerRow
from peers.status.view import Joining, StageRow, SwarmView, TrainerRow, remedy
from swarm import config as configs
from swarm.rpc.entry import Entry
from swarm.rpc.invite import Invite
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PeerRecord, PeerState


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


def test_of_a_block_without_peers_the_paths_through_it_are_told() -> None:
    peers = (PeerRow(name="p", peer_id="", state="serving"),)
    rows = [(0, 0, peers), (1, 0, ()), (1, 1, peers), (2, 0, ())]
    stages = tuple(StageRow(stage=stage, variant=variant, peers=served) for stage, variant, served in rows)
    view = SwarmView(run="r", stages=stages)
    assert (view.empty_stages, view.waiting_paths) == ([1, 2], {})
    view = dataclasses.replace(view, paths=((0, 0, 0), (0, 1, 0), *((0, 1, 0) for _ in range(8))))
    assert view.waiting_paths == {1: "path 0", 2: "paths 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"}


def test_who_has_an_older_release_is_told() -> None:
    peers = [PeerRow(name=f"p{n}", peer_id="", protocol=6 if n < 2 else 5) for n in range(12)]
    view = SwarmView(run="r", stages=(StageRow(stage=0, peers=(peers[0],)), StageRow(stage=1, peers=(peers[1],))))
    assert view.older == []
    silent, trainer = PeerRow(name="silent", peer_id=""), TrainerRow(name="trainer", protocol=5)
    view = dataclasses.replace(view, stages=(*view.stages, StageRow(stage=2, peers=(silent,))), trainers=(trainer,))
    ending = "; update before a release with protocol 7 comes, which leaves them out"
    assert view.older == ["of an older release, with protocol 5 and not 6: trainer" + ending]
    view = dataclasses.replace(view, stages=(StageRow(stage=0, peers=tuple(peers)),))
    assert view.older == [
        "of an older release, with protocol 5 and not 6: p10, p11, p2, p3, p4, p5, p6, p7 and 3 more" + ending
    ]


def test_json_has_every_field() -> None:
    peer = PeerRow(name="p", peer_id="ab", state="serving", rerouted_backwards=3)
    view = SwarmView(
        run="r", stages=(StageRow(stage=0, peers=(peer,)),), trainers=(TrainerRow(name="t"),), events=("x",)
    )
    document = json.loads(view.to_json())
    assert document["stages"][0]["peers"][0]["rerouted_backwards"] == 3
    assert document["trainers"] == [
        {"name": "t", "protocol": 0, "step": 0, "loss": None, "tokens_per_second": 0.0, "paths": [], "bans": []}
    ]
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


CONFIG = configs.load_preset("tiny")
ENTRY = Entry.parse(f"{'a' * 40}@192.0.2.1:5001")


def _record(number: int, stage: int, state: PeerState = PeerState.SERVING) -> PeerRecord:
    return PeerRecord(
        peer_id=f"{number:040x}", announced_at=1.0, stage=stage, endpoint=f"192.0.2.{number}:5001", state=state
    )


def _options(line: str) -> PeerOptions:
    program, *words = line.split()
    assert program == "swarm-peer"
    return cli.parse(PeerOptions, prog=program, argv=words)


def test_a_stage_that_nobody_has_served_needs_a_peer_and_no_more() -> None:
    told = remedy(Joining.at(CONFIG, [ENTRY], insecure=True).peer, 1, run_round=0, may_return=True)
    options = _options(told.removeprefix("start one with "))
    assert (options.stage, options.insecure) == (StageChoice(1, 1), True)
    assert (options.resume, options.start_over) == (None, False)
    assert options.invite is not None
    assert Invite.parse(options.invite).entries == (ENTRY,)


def test_what_a_stage_has_learnt_is_taken_from_a_checkpoint_or_given_up_knowingly() -> None:
    """A peer begins anew only if the user asks for it (resume.choose)."""
    told = remedy(Joining.at(CONFIG, [ENTRY], insecure=False).peer, 1, run_round=7, may_return=False)
    line = told.partition("start one with ")[2].partition(",")[0]
    assert _options(line).resume is not None
    assert _options(line.replace("--resume DIR", "--start-over")).start_over


def test_nobody_is_advised_to_give_up_what_a_peer_holds_that_fell_silent() -> None:
    told = remedy(Joining.at(CONFIG, [ENTRY], insecure=False).peer, 1, run_round=7, may_return=True)
    assert told.startswith("what it has learnt is with that peer, which may only be frozen, cut off or on its way to")
    assert "--start-over" not in told
    line = told.partition("start one with ")[2].partition(",")[0]
    assert _options(line).resume is not None


def test_a_locked_run_s_line_says_where_the_token_goes() -> None:
    locked = dataclasses.replace(CONFIG, owner="ab" * 32)
    joining = Joining.at(locked, [ENTRY], insecure=False)
    for line in dataclasses.astuple(joining):
        word, _, token = line.split()[1].partition("#")
        assert Invite.parse(word).is_locked
        assert token == "TOKEN"


def test_they_lead_to_peers_of_several_stages_that_serve() -> None:
    records = [_record(1, 0), _record(2, 0), _record(3, 1, PeerState.LEAVING), _record(4, 1), _record(5, 2)]
    rows = [[record for record in records if record.stage == stage] for stage in range(3)]
    lines = dataclasses.astuple(Joining.at(CONFIG, entries_of(rows), insecure=True))
    assert [line.split()[0] for line in lines] == ["swarm-peer", "swarm-trainer", "swarm-status"]
    for line in lines:
        assert line.endswith(" --insecure")
        invite = Invite.parse(line.split()[1])
        assert invite.is_to(CONFIG.run_id)
        assert not invite.is_locked
        hosts = [entry.host for entry in invite.entries]
        assert hosts == ["192.0.2.1", "192.0.2.4", "192.0.2.5", "192.0.2.2"][: len(hosts)]
        assert len(hosts) > 1
