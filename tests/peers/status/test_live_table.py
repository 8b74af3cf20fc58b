"""What the table says on a terminal, and the lines it becomes elsewhere."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

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
