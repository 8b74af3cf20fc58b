"""The command lines with which others join a run work as printed."""

import dataclasses

from peers.shared import cli
from peers.shared.network import entries_of
from peers.stage_peer.options import PeerOptions
from peers.status.joining import Joining, remedy
from swarm import config as configs
from swarm.rpc.entry import Entry
from swarm.rpc.invite import Invite
from swarm.types import PeerRecord, PeerState

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
    assert (options.stage, options.insecure, options.resume, options.start_over) == (1, True, None, False)
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


def test_a_text_that_comes_from_a_class_is_named_by_who_feeds_it() -> None:
    config = dataclasses.replace(
        CONFIG, data=dataclasses.replace(CONFIG.data, dataset=("class:my.rows:Rows", "my books"))
    )
    joining = Joining.at(config, [ENTRY], insecure=False)
    assert joining.trainer.endswith(" --steps 100 --dataset class:my.rows:Rows --dataset 'my books'")
    assert "class:" not in joining.peer


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


def test_where_no_peer_is_known_the_invite_is_to_be_filled_in() -> None:
    assert Joining.at(CONFIG, [], insecure=False).peer == "swarm-peer INVITE"
