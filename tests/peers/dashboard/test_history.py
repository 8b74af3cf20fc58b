"""What a dashboard remembers: participants, contributions and events; also after a restart."""

from dataclasses import replace
from pathlib import Path

import pytest

from peers.dashboard.history import (
    MOST_AT_ONCE,
    MOST_EVENTS,
    History,
    HistoryFile,
    Line,
    Series,
    figures_over_time,
    news,
)
from peers.dashboard.rounds import FARTHEST, MOST_PEERS, MOST_ROUNDS
from peers.status.contributions import Tallies
from peers.status.peer_row import PeerRow
from peers.status.view import SwarmView
from swarm.credentials.identity import generate
from swarm.training.complaints import Complaints, Named
from swarm.training.tally import EMPTY, Given
from swarm.types import Block
from tests.support.views import peer, peer_id, view

A, B = peer_id("ann"), peer_id("bob")


def _silent(row: PeerRow) -> PeerRow:
    return replace(row, state="unreachable")


def _started(row: PeerRow, at: float) -> PeerRow:
    return replace(row, started_at=at)


def _after(*views: SwarmView, every: float = 2.0) -> History:
    history, before = History(run="run"), None
    for number, seen in enumerate(views, start=1):
        history.add(before, seen, number * every)
        before = seen
    return history


def test_who_took_part_and_who_was_there_and_did_not() -> None:
    early = view([peer("ann", round=1, recent_rounds=(0,)), peer("bob", round=1, recent_rounds=(0,))])
    later = view([peer("ann", round=2, recent_rounds=(0, 1)), peer("bob", round=2, recent_rounds=(0,))])
    history = _after(early, later)
    rounds = {number: found.stages["0"] for number, found in history.rounds.rounds.items()}
    assert rounds[0].took_part == [*rounds[1].took_part, B] == [A, B]
    assert history.rounds.to_json()["1"] == {"at": 4.0, "stages": {"0": {"took_part": [A], "missing": [B]}}}
    # A peer that reports a moment later has taken part, too.
    history.add(later, view([peer("bob", round=2, recent_rounds=(0, 1))]), 6.0)
    assert history.rounds.to_json()["1"] == {"at": 4.0, "stages": {"0": {"took_part": [A, B], "missing": []}}}


def test_who_was_not_there_misses_no_round() -> None:
    first = view([peer("ann", round=5, recent_rounds=(3, 4)), peer("bob", round=5)])
    history = _after(first)
    assert history.rounds.to_json()["4"] == {"at": 2.0, "stages": {"0": {"took_part": [A], "missing": []}}}


def test_a_boast_about_rounds_replaces_none() -> None:
    honest = [peer(name, round=10, recent_rounds=(8, 9)) for name in ("ann", "bob")]
    liar = peer("liar", round=10**12, recent_rounds=tuple(range(10**12, 10**12 + 16)))
    assert sorted(_after(view([*honest, liar])).rounds.rounds) == [8, 9]
    looks = [view([peer("ann", round=n + 1, recent_rounds=(n,))]) for n in range(MOST_ROUNDS + 30)]
    assert FARTHEST >= MOST_ROUNDS
    assert sorted(_after(*looks).rounds.rounds) == list(range(30, MOST_ROUNDS + 30))


def _given(**given: Given) -> Tallies:
    peers = {peer_id(name): gave for name, gave in given.items()}
    tally = EMPTY.after(0, parent="", result="", given=peers)
    return Tallies("run", {Block(0): tally, Block(1): tally}, names={peer_id("gone"): "gone"})


def test_contributions_are_those_of_the_tally_and_time_is_what_was_seen() -> None:
    history = _after(view([peer("ann")]), view([], [peer("ann")]), view([], [peer("ann", started_at=9.0)]))
    history.contributions.take(_given(ann=Given(5, 50, 500, 1), gone=Given(7, 70, 700, 1)))
    ann, gone = history.contributions.peers[A], history.contributions.peers[peer_id("gone")]
    assert (ann.serving_seconds, ann.first_seen, ann.last_seen) == (4.0, 2.0, 6.0)
    assert ann.given == Given(10, 100, 1000, 2)
    assert (gone.name, gone.given, gone.first_seen) == ("gone", Given(14, 140, 1400, 2), 0.0)
    history.contributions.take(_given(ann=Given(6, 60, 600, 2)))
    assert history.contributions.peers[A].given.samples == 12
    assert history.contributions.to_json()[A]["given"] == {
        "samples": 12, "targets": 120, "num_bytes": 1200, "rounds": 4
    }  # fmt: skip


def test_who_most_members_have_signed_to_be_a_liar_is_named_while_they_do() -> None:
    history, keys = _after(view([peer("ann")])), [generate() for _ in range(4)]
    tally = EMPTY.after(0, parent="", result="", given={key.peer_id: Given(1, 1, 1, 1) for key in keys})

    def told(num_accusers: int) -> Tallies:
        said = [Complaints(named={A: Named(0, "ann lies")}).to_text() if n < num_accusers else "" for n in range(4)]
        signed = [tally.sign(key.sign_with_point, "run", Block(0), text) for key, text in zip(keys, said, strict=True)]
        tallies = Tallies("run")
        tallies.add(Block(0), [tally.settled(signed, "run", Block(0)).to_text()])
        return tallies

    history.contributions.take(told(3))
    assert history.contributions.to_json()[A]["named"] == "ann lies"
    history.contributions.take(told(2))
    assert history.contributions.to_json()[A]["named"] == ""


def test_time_in_which_nobody_watched_is_nobodys() -> None:
    history = _after(view([peer("ann")]), view([peer("ann")]), every=3600.0)
    assert history.contributions.peers[A].serving_seconds == 0.0


def test_those_seen_last_are_kept_of_too_many_peers() -> None:
    crowd = view([peer(f"peer {number}") for number in range(MOST_PEERS + 5)])
    history = _after(view([peer("ann")]), crowd)
    assert len(history.contributions.peers) == MOST_PEERS
    assert A not in history.contributions.peers


ANN, BOB = peer("ann"), peer("bob")


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        (view([], []), view([ANN], []), ["stage 0 has a peer again", "ann serves stage 0"]),
        (view([ANN]), view([_silent(ANN)]), ["no peer of stage 0 answers", "ann of stage 0 does not answer"]),
        (view([_silent(ANN), BOB]), view([ANN, BOB]), ["ann answers again"]),
        (view([ANN, BOB]), view([BOB]), ["ann of stage 0 has gone"]),
        (view([replace(ANN, state="leaving"), BOB]), view([BOB]), []),
        (view([ANN, BOB]), view([replace(ANN, state="leaving"), BOB]), ["ann leaves stage 0"]),
        (view([BOB]), view([BOB, replace(ANN, state="joining")]), ["ann is on its way to stage 0"]),
        (view([_started(ANN, 1.0)]), view([_started(ANN, 9.0)]), ["ann of stage 0 was started again"]),
        (view([ANN, BOB], [peer("cid")]), view([BOB], [peer("cid"), ANN]), ["ann has moved from stage 0 to stage 1"]),
        (view([], [BOB]), view([ANN], [ANN, BOB]), ["stage 0 has a peer again", "ann serves stage 0-1"]),
        (view([ANN, BOB], [BOB]), view([ANN, BOB], [ANN, BOB]), ["ann serves stage 0-1"]),
        (view([ANN, BOB], [ANN, BOB]), view([BOB], [BOB]), ["ann of stage 0-1 has gone"]),
        (view([ANN], step=None), view([ANN]), ["trainer feeder is there"]),
        (view([ANN]), view([ANN], step=None), ["trainer feeder has gone"]),
        (view([ANN]), view([replace(ANN, refusals=("1a2b is elsewhere",))]), ["ann: 1a2b is elsewhere"]),
        (view([ANN]), view([replace(ANN, round=9, samples=3)], step=2), []),
    ],
)
def test_what_happened_between_two_looks(before: SwarmView, now: SwarmView, lines: list[str]) -> None:
    assert [line.text for line in news(before, now)] == lines


def test_a_crowd_makes_no_flood_of_events() -> None:
    history = _after(view([]), view([peer(f"peer {number}") for number in range(500)]))
    assert len(history.events) == MOST_AT_ONCE + 2
    assert history.events[-1].text.endswith("more changes")
    for number in range(MOST_EVENTS):
        history.happened(Line("plain", str(number)), 9.0)
    assert [event.text for event in history.events] == [str(number) for number in range(MOST_EVENTS)]


def test_history_comes_back(tmp_path: Path) -> None:
    seen = view([peer("ann", round=2, recent_rounds=(0, 1))], [peer("bob")], loss=1.5)
    history = _after(seen, replace(seen, trainers=()))
    history.contributions.peers[A].given = Given(5, 50, 500, 1)
    file = HistoryFile(tmp_path / "run.json")
    assert file.read("run") == History(run="run")
    file.write(history)
    assert file.read("run") == history
    assert file.read("another run") == History(run="another run")
    # A history that is read back goes on from there.
    again = file.read("run")
    again.add(None, seen, 100.0)
    assert again.contributions.peers[A].given == Given(5, 50, 500, 1)
    assert len(again.events) == len(history.events) + 1


@pytest.mark.parametrize("content", ["", "{", '{"run": "run", "series": {"hour": 5}}', "[]"])
def test_a_file_that_is_no_history_is_set_aside(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    assert HistoryFile(path).read("run") == History(run="run")
    assert (tmp_path / "run.unreadable").read_text() == content
    assert "is no history" in caplog.text


def test_a_folder_that_cannot_be_written_to_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = HistoryFile(tmp_path / "gone" / "run.json")
    file.write(History(run="run"))
    file.write(History(run="run"))
    assert caplog.text.count("the history is not written") == 1


def _filled(series: Series, *values: float | None, every: float = 1.0) -> Series:
    for number, value in enumerate(values):
        series.add(1000.0 + number * every, {"loss": value})
    return series


def test_a_span_has_the_mean_of_what_is_known_of_it() -> None:
    series = _filled(Series(span_seconds=4.0, max_spans=9), 1.0, 3.0, None, 5.0, None, None, None, None, 7.0)
    assert series.at == [1000.0, 1004.0, 1008.0]
    assert series.columns == {"loss": [3.0, None, 7.0]}


def test_a_clock_that_is_set_back_does_not_turn_time_around() -> None:
    series = _filled(Series(span_seconds=1.0, max_spans=9), 1.0, 2.0)
    series.add(900.0, {"loss": 4.0})
    assert (series.at, series.columns) == ([1000.0, 1001.0], {"loss": [1.0, 3.0]})


def test_spans_that_coarsen_keep_the_whole_time() -> None:
    series = _filled(Series(span_seconds=1.0, max_spans=8, coarsens=True), *map(float, range(100)))
    assert len(series.at) <= 8
    assert (series.at[0], series.span_seconds) == (1000.0 - 1000.0 % series.span_seconds, 16.0)
    known = [value for value in series.columns["loss"] if value is not None]
    assert known == sorted(known)
    assert known[-1] > 90.0


def test_the_pace_is_that_of_the_slowest_stage_with_all_its_variants() -> None:
    rates = [("ann", 4.0), ("bob", 2.5), ("cid", 3.0), ("dan", 9.0)]
    seen = view(*([peer(name, samples_per_second=rate)] for name, rate in rates))
    blocks = [Block(0), Block(1), Block(1, 1), Block(2)]
    variants = [
        replace(row, stage=block.stage, variant=block.variant) for row, block in zip(seen.stages, blocks, strict=True)
    ]
    assert figures_over_time(seen)["samples_per_second"] == 2.5
    assert figures_over_time(replace(seen, stages=tuple(variants)))["samples_per_second"] == 4.0
