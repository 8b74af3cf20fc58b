"""The records people see, and their JSON."""

import dataclasses
import json

from peers.shared import cli
from peers.shared.stage_choice import StageChoice
from peers.stage_peer.options import PeerOptions
from peers.status.peer_row import PeerRow
from peers.status.view import Joining, StageRow, SwarmView, TrainerRow, remedy
from swarm import config as configs
from swarm.rpc.entry import Entry
from swarm.rpc.invite import Invite


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


CONFIG = configs.load_preset("tiny")
ENTRY = Entry.parse(f"{'a' * 40}@192.0.2.1:5001")


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
