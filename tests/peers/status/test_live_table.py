"""What the table says on a terminal, and the lines it becomes elsewhere."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from peers.status.answer import LastPeer
from peers.status.live_table import LiveTable, plain_lines, render
from peers.status.peer_row import PeerRow
from peers.status.view import StageRow, SwarmView, TrainerRow

PEER = PeerRow(
    name="host-1", peer_id="ab", state="serving", samples_per_second=12.34, forwards=71, rerouted_backwards=9
)
VIEW = SwarmView(
    run="demo",
    stages=(StageRow(stage=0, peers=(PEER,)), StageRow(stage=1)),
    trainers=(TrainerRow(name="trainer-1", step=3, loss=2.5, tokens_per_second=1234.5),),
    events=("step 2: killed peer 1-0",),
)


def _draw(view: SwarmView) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None, soft_wrap=True)
    console.print(render(view))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_shows_peers_trainers_events_and_the_empty_stage() -> None:
    drawn = _draw(VIEW)
    for text in ("run demo", "host-1", "serving", "12.3", "71", "9", "trainer-1", "2.500", "killed peer 1-0"):
        assert text in drawn
    assert "stage 1 has no peer: start one with swarm-peer INVITE --stage 1" in drawn


def test_of_a_stage_whose_peers_do_not_answer_nobody_is_told_to_start_one() -> None:
    silent = replace(PEER, state="unreachable")
    view = replace(VIEW, stages=(StageRow(stage=0, peers=(silent, replace(silent, name="host-2"))),))
    (line,) = [line for line in plain_lines(view) if line.startswith("no peer of stage 0")]
    assert line == "no peer of stage 0 answers (host-1, host-2): just died, frozen, or out of reach from here"
    assert "start one" not in _draw(view)


def test_who_leaves_whom_alone_is_a_line_that_changes_only_with_its_cause() -> None:
    def view(until: float, reason: str = "no answer") -> SwarmView:
        banning = replace(PEER, name="host-0", bans=({"peer_id": "ab", "reason": reason, "until": until},))
        trainer = TrainerRow(name="trainer-1", bans=({"peer_id": "f" * 40, "reason": "too slow", "until": 1e300},))
        stages = (StageRow(stage=0, peers=(banning,)), StageRow(stage=1, peers=(PEER,)))
        return replace(VIEW, stages=stages, trainers=(trainer,))

    before, after = plain_lines(view(1.0)), plain_lines(view(3601.0))
    assert before.keys() == after.keys() != plain_lines(view(1.0, "out of memory")).keys()
    drawn = _draw(view(1.0))
    assert "host-0 leaves host-1 alone until " in drawn
    assert "trainer-1 leaves ffffffff alone until " in drawn


def test_whom_a_peer_does_not_follow_is_shown_and_elsewhere_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    def view(round_number: int) -> SwarmView:
        refused = replace(PEER, refusals=(f"1a2b says that it is at round {round_number} of another branch",))
        return replace(VIEW, stages=(StageRow(stage=0, peers=(refused,)),))

    assert "host-1: 1a2b says that it is at round 1000 of another branch" in _draw(view(1000))
    with LiveTable(Console()) as table:
        for round_number in (1000, 1001):
            table.show(view(round_number))
    assert capsys.readouterr().out.count("of another branch") == 1


def test_names_from_strangers_are_no_markup() -> None:
    assert "[red]x[/nope]" in _draw(
        replace(VIEW, stages=(StageRow(stage=0, peers=(replace(PEER, name="[red]x[/nope]"),)),))
    )


def test_without_a_terminal_only_news_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveTable(Console()) as table:
        table.show(VIEW)
        table.show(replace(VIEW, trainers=(replace(VIEW.trainers[0], tokens_per_second=99.0),)))
        table.show(replace(VIEW, trainers=(TrainerRow(name="trainer-1", step=4, loss=2.25, tokens_per_second=10),)))
    assert capsys.readouterr().out.splitlines() == [
        "step 2: killed peer 1-0",
        "stage 1 has no peer: start one with swarm-peer INVITE --stage 1",
        "step 3: loss 2.500, 1,234 tokens/s",
        "step 4: loss 2.250, 10 tokens/s",
    ]


def test_several_runs_are_shown_below_each_other_and_their_news_apart(capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(VIEW, run="other")
    with LiveTable(Console()) as table:
        table.show(VIEW)
        table.show(VIEW, other)
    assert capsys.readouterr().out.splitlines() == [*plain_lines(VIEW).values(), *plain_lines(other).values()]
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with LiveTable(console) as table:
        table.show(VIEW, other)
    assert isinstance(console.file, io.StringIO)
    assert "run demo" in console.file.getvalue()
    assert "run other" in console.file.getvalue()


def test_variants_stand_below_each_other_and_who_waits_for_one_is_told() -> None:
    stages = (StageRow(stage=0, peers=(PEER,)), StageRow(stage=1, peers=(PEER,)), StageRow(stage=1, variant=1))
    trainers = (TrainerRow(name="one", paths=(1,)), TrainerRow(name="other"))
    view = replace(VIEW, stages=stages, trainers=trainers, paths=((0, 0), (0, 1)))
    lines = _draw(view).splitlines()
    begins = [line.split()[:2] for line in lines if line.strip() and line.split()[0] in ("0", "1", "1.1")]
    assert begins == [["0", "host-1"], ["1", "host-1"], ["1.1", "no"]]
    assert [line.split("│")[-2].strip() for line in lines if "│ o" in line] == ["1", "all"]
    expected = "stage 1.1 has no peer, and path 1 cannot go on: start one with swarm-peer INVITE --stage 1.1"
    assert expected in plain_lines(view)


def test_of_a_stage_without_a_peer_it_is_said_when_the_last_one_was_heard_of() -> None:
    last = LastPeer(name="gpu-2", last_at=0.0, has_left=False)
    empty = replace(VIEW, stages=(StageRow(stage=0, peers=(PEER,)), StageRow(stage=1, last_peer=last)))
    (line,) = [line for line in plain_lines(empty) if "no peer" in line]
    assert re.match(r"stage 1 has no peer \(gpu-2 was last heard of at \d\d:\d\d:\d\d\): start one with", line)
    begun = replace(PEER, round=3)
    for has_left in (False, True):
        row = StageRow(stage=1, last_peer=replace(last, has_left=has_left))
        (line,) = [
            line
            for line in plain_lines(replace(empty, stages=(StageRow(stage=0, peers=(begun,)), row)))
            if "no peer" in line
        ]
        assert ("is waited for" in line, "--start-over" in line) == (not has_left, has_left)
    silent = StageRow(stage=1, peers=(replace(PEER, state="unreachable"),), last_peer=replace(last, has_left=True))
    (line,) = [line for line in plain_lines(replace(VIEW, stages=(silent,))) if "answers" in line]
    assert re.search(r"out of reach from here \(gpu-2 left at \d\d:\d\d:\d\d\)$", line)
