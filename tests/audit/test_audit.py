"""What the audit proves of honest logs, and what it finds wrong with rounds and branches."""

from pathlib import Path

import pytest

from swarm.audit.audit import audit
from swarm.events import Abort, Ack, Install, Leave, State, Step
from swarm.training.run_rounds import next_lineage
from swarm.types import Block
from tests.audit.honest import (
    BOTH,
    ROUND_MICROBATCHES,
    ROUNDS,
    HonestRun,
    Lines,
    edit,
    honest_run,
    one_violation,
    start,
)

# -- honest logs -------------------------------------------------------------------------------------------------------


@BOTH
def test_an_honest_run_is_proven(tmp_path: Path, setting: str) -> None:
    run = honest_run(tmp_path, setting)
    report = audit(run.files)
    assert report.proven
    assert report.findings.violations == []
    assert (report.run, report.setting, report.files) == ("run.1", setting, 5)
    assert (report.rounds_committed, report.rounds_aborted) == (ROUNDS, 0)
    found = report.findings
    assert (found.duplicates, found.missing, report.replayed, found.rolled_back) == (0, 0, 0, 0)
    # Two peers of each stage, at the beginning and after every round.
    assert (report.findings.digests_compared, report.findings.digests_differing) == (2 * (ROUNDS + 1), 0)
    assert report.lost_share == 0.0
    assert [stage.first_attempt for stage in report.stages] == [ROUNDS] * 2


@BOTH
def test_the_events_of_several_blocks_in_one_file_are_told_apart(tmp_path: Path, setting: str) -> None:
    run = honest_run(tmp_path, setting, has_span=True)
    report = audit(run.files)
    assert report.findings.violations == []
    assert (report.files, report.rounds_committed) == (4, ROUNDS)
    assert report.findings.digests_compared == 2 * (ROUNDS + 1)

    def broken(lines: Lines) -> None:
        next(line for line in lines if line["event"] == "state" and line["block"] == "1").update(digest="another")

    edit(tmp_path / "peer-0a.jsonl", broken)
    assert one_violation(audit(run.files), "").startswith("stage 1, round 1: ")


@BOTH
def test_a_process_that_leaves_one_of_its_blocks_goes_on_with_the_others(tmp_path: Path, setting: str) -> None:
    run = HonestRun(tmp_path, setting, has_span=True)
    run.round(0)
    run.accumulate("peer-1a", ROUND_MICROBATCHES)
    run.write("peer-1a", Leave())
    # What was under way is undone afterwards, and the digest of the last state is known late.
    run.roll_back("peer-1a", ROUND_MICROBATCHES)
    run.write("peer-1a", State(round=1, lineage=run.lineages[1], digest="state 1 1"))
    ids = range(ROUND_MICROBATCHES, 2 * ROUND_MICROBATCHES)
    for microbatch in ids:
        run.write("trainer", Ack(microbatch=microbatch))
        run.train("peer-0a", microbatch)
        run.train("peer-1b", microbatch)
    run.average(1, {"peer-0a": ids, "peer-1b": ids, "peer-0b": ()})
    report = audit(run.files)
    assert report.findings.violations == []
    assert (report.rounds_committed, report.lost_share, report.findings.rolled_back) == (2, 0.0, 1)


@BOTH
def test_a_round_may_be_committed_after_a_member_of_it_has_left(tmp_path: Path, setting: str) -> None:
    run = honest_run(tmp_path, setting)

    def leave_early(lines: Lines) -> None:
        last = max(number for number, line in enumerate(lines) if line["event"] == "commit")
        lines.insert(last, {name: lines[last][name] for name in ("time", "monotonic", "block")} | {"event": "leave"})

    edit(tmp_path / "peer-1a.jsonl", leave_early)
    report = audit(run.files)
    assert report.proven, report.findings.violations
    assert report.rounds_committed == ROUNDS


@BOTH
def test_what_was_rolled_back_does_not_count(tmp_path: Path, setting: str) -> None:
    run = HonestRun(tmp_path, setting)
    run.accumulate("peer-1b", 4)
    run.roll_back("peer-1b", 4)
    run.round(0)
    report = audit(run.files)
    assert report.findings.violations == []
    assert report.findings.rolled_back == 1


@BOTH
def test_rounds_of_which_no_file_tells_are_not_proven(tmp_path: Path, setting: str) -> None:
    """The members of these rounds are gone, with their files. Peers that joined later got the state from them."""
    run = honest_run(tmp_path, setting)

    def joined_later(lines: Lines) -> Lines:
        first = max(number for number, line in enumerate(lines) if line["event"] == "commit" and line["round"] == 0)
        state = {**lines[1], "round": 1, "lineage": lines[first]["lineage"], "state": "x", "source": "download"}
        return [lines[0], state, *lines[first + 1 :]]

    for peer in run.members(1):
        edit(tmp_path / f"{peer}.jsonl", joined_later)
    found = one_violation(audit(run.files), "follows from a state of which no file tells how it came about")
    assert "stage 1" in found
    assert "round 1" in found


def test_a_process_goes_on_in_the_file_of_one_that_was_killed(tmp_path: Path) -> None:
    """What the killed process had accumulated is gone, and others count it."""
    run = HonestRun(tmp_path)
    run.round(0)
    run.train("peer-1b", 9)
    with (tmp_path / "peer-1b.jsonl").open("a") as file:
        file.write('{"event":"ack","time":1.0,"mono')
    run.reopen("peer-1b")
    run.write("peer-1b", start("peer-1b", 1, "synchronous"))
    run.write("peer-1b", Install(round=0, lineage="genesis 1", state="initial", source="initial"))
    run.write("peer-1b", Install(round=1, lineage=run.lineages[1], state="state 1 1", source="download"))
    run.round(1)
    report = audit(run.files)
    assert report.findings.violations == []
    assert (report.findings.duplicates, report.rounds_committed) == (0, 2)


def test_a_peer_that_was_started_again_commits_what_it_had_prepared_before(tmp_path: Path) -> None:
    run = HonestRun(tmp_path)
    run.round(0)
    run.round(1)

    def start_again(lines: Lines) -> None:
        prepared = max(number for number, line in enumerate(lines) if line["event"] == "prepare")
        took_over = {**lines[1], "round": 1, "lineage": lines[prepared]["lineage"], "state": "state 1 1"}
        lines[prepared + 1 : prepared + 1] = [lines[0], took_over]

    edit(tmp_path / "peer-1b.jsonl", start_again)
    assert audit(run.files).findings.violations == []


def test_a_commit_of_what_was_never_begun_is_found(tmp_path: Path) -> None:
    run = HonestRun(tmp_path)
    run.round(0)
    run.round(1)

    def forget(lines: Lines) -> None:
        del lines[max(number for number, line in enumerate(lines) if line["event"] == "begin")]

    edit(tmp_path / "peer-1b.jsonl", forget)
    assert "had not begun its attempt" in str(audit(run.files).findings.violations)


def test_who_never_had_an_exchanges_result_is_judged_by_what_it_had_closed_for_it(tmp_path: Path) -> None:
    """The member's own exchange failed, and it then closed again. The others still committed."""
    run = HonestRun(tmp_path)
    run.round(0)
    run.round(1, lost=["peer-1b"])
    report = audit(run.files)
    assert report.findings.violations == []
    assert (report.rounds_committed, report.findings.duplicates, report.findings.missing) == (2, 0, 0)


def test_a_loss_in_what_such_a_member_had_closed_is_found(tmp_path: Path) -> None:
    run = HonestRun(tmp_path)
    run.round(0)
    run.round(1, lost=["peer-1b"])

    def lose(lines: Lines) -> Lines:
        closed = next(line for line in lines if line["event"] == "close" and line["round"] == 1)
        closed.update(microbatches="11 13 15", samples=6, round_samples=6)
        first = next(number for number, line in enumerate(lines) if line.get("microbatch") == 9)
        return lines[:first] + lines[first + 2 :]

    edit(tmp_path / "peer-1b.jsonl", lose)
    one_violation(audit(run.files), "missing in a committed round")


def test_a_peer_that_moves_begins_afresh_at_its_new_stage(tmp_path: Path) -> None:
    run = HonestRun(tmp_path)
    run.round(0)
    run.write("peer-1b", Leave())
    run.write("peer-1b", Install(round=0, lineage="genesis 0", state="initial", source="initial"), Block(0))
    run.write("peer-1b", Install(round=1, lineage=run.lineages[0], state="state 0 1", source="download"), Block(0))
    run.write("peer-1b", Leave(), Block(0))
    assert audit(run.files).findings.violations == []


# -- rounds ------------------------------------------------------------------------------------------------------------


def test_a_planted_difference_of_digests_is_found(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    edit(tmp_path / "peer-0b.jsonl", lambda lines: lines[-1].update(digest="another") or lines)
    report = audit(run.files)
    assert (report.findings.digests_compared, report.findings.digests_differing) == (2 * (ROUNDS + 1), 1)
    assert one_violation(report, "digest").startswith("stage 0, round 3: the state of lineage")


def test_a_lineage_that_does_not_follow_is_found(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    edit(tmp_path / "peer-0b.jsonl", lambda lines: lines[-2].update(members=["peer-0b"]) or lines)
    one_violation(audit(run.files), "does not follow")


def test_a_member_of_another_branch_is_found(tmp_path: Path) -> None:
    run = honest_run(tmp_path)

    def stray(lines: Lines) -> None:
        next(line for line in lines if line["event"] == "begin")["lineage"] = "elsewhere"

    edit(tmp_path / "peer-1a.jsonl", stray)
    one_violation(audit(run.files), "on another branch than it stood")


def test_a_commit_before_another_stage_holds_its_result_is_found(tmp_path: Path) -> None:
    run = honest_run(tmp_path)

    def hurry(lines: Lines) -> None:
        next(line for line in lines if line["event"] == "commit")["monotonic"] = 0.0

    edit(tmp_path / "peer-0a.jsonl", hurry)
    assert one_violation(audit(run.files), "before stage 1 held").startswith("stage 0, round 0: committed before")


def test_a_stage_that_goes_on_alone_is_found(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    for peer in run.members(1):
        edit(tmp_path / f"{peer}.jsonl", lambda lines: [line for line in lines if line.get("round") != 2])
    one_violation(audit(run.files), "committed before stage 1 held its result")


def test_a_missing_file_leaves_its_peers_contributions_unproven(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    report = audit([path for path in run.files if path.name != "peer-1a.jsonl"])
    unproven = [line for line in report.findings.violations if "no file tells what peer-1a contributed" in line]
    assert len(unproven) == ROUNDS


@BOTH
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_without_any_file_leaves_the_run_unproven(tmp_path: Path, setting: str, stage: int) -> None:
    """With DiLoCo the rounds of each stage are judged separately, so nothing else would show that the stage is
    missing."""
    run = honest_run(tmp_path, setting)
    report = audit([path for path in run.files if not path.name.startswith(f"peer-{stage}")])
    assert one_violation(report, "no file of any") == f"stage {stage}: no file of any of its peers was given"


@BOTH
def test_a_run_without_a_trainers_file_is_unproven(tmp_path: Path, setting: str) -> None:
    run = honest_run(tmp_path, setting)
    report = audit([path for path in run.files if path.name != "trainer.jsonl"])
    (violation,) = report.findings.violations
    assert violation == "trainer: no file of any was given, so nothing tells what they acknowledged"
    assert not report.proven


def test_a_stage_that_a_peer_moved_to_has_a_file(tmp_path: Path) -> None:
    run = HonestRun(tmp_path, "diloco")
    run.write("peer-0b", Leave())
    run.write("peer-0b", Install(round=0, lineage=run.lineages[1], state="initial", source="download"), Block(1))
    assert audit([path for path in run.files if not path.name.startswith("peer-1")]).proven


def test_two_branches_are_judged_by_themselves(tmp_path: Path) -> None:
    """The same microbatches are on both branches, which is no duplicate."""
    run = HonestRun(tmp_path)
    run.round(0)
    ids = range(8, 16)
    for microbatch in ids:
        run.write("trainer", Ack(microbatch=microbatch))
        for stage in range(2):
            for peer in run.members(stage):
                run.train(peer, microbatch)
    before = list(run.lineages)
    run.average(1, {"peer-0a": ids, "peer-1a": ids})
    run.lineages = before
    run.bucket -= 1
    run.average(1, {"peer-0b": ids, "peer-1b": ids})
    report = audit(run.files)
    assert report.findings.violations == []
    assert (report.rounds_committed, report.findings.duplicates) == (2, 0)


def test_who_committed_without_the_others_is_judged_by_what_they_had_closed_for_it(tmp_path: Path) -> None:
    """A line broke when one member had prepared the result of both. That member committed this result. The other one
    committed its own contribution alone."""
    run = HonestRun(tmp_path, "diloco")
    run.round(0)
    ids = range(8, 16)
    given = {peer: ids[nth::2] for stage in range(2) for nth, peer in enumerate(run.members(stage))}
    for microbatch in ids:
        run.write("trainer", Ack(microbatch=microbatch))
        for stage in range(2):
            run.train(run.members(stage)[microbatch % 2], microbatch)
    before = list(run.lineages)
    for stage in range(2):
        first, _ = run.members(stage)
        run.write(first, Step(bucket=run.bucket, samples=8))
        run.promise(first, stage, 1, given[first], attempt=1, leader=first)
        run.write(first, Abort(round=1, attempt=1, leader=first, reason="the line broke"))
    run.average(1, {peer: ids for peer, ids in given.items() if peer.endswith("a")}, stepped=given, attempt=2)
    run.lineages = before
    run.bucket -= 1
    run.average(1, given, stepped=["peer-0a", "peer-1a"], silent=["peer-0a", "peer-1a"])
    report = audit(run.files)
    assert report.findings.violations == []
    assert (report.rounds_committed, report.findings.duplicates) == (2, 0)


def test_a_stage_that_came_back_from_an_old_state_has_lost_the_rounds_since(tmp_path: Path) -> None:
    run = honest_run(tmp_path, "diloco")
    first = next_lineage("genesis 1", 0, "digest 0.1", run.members(1), total_squared_norm=0.0, partners=())
    run.lineages[1] = "again"
    for peer in run.members(1):
        run.write(peer, start(peer, 1, "diloco"))
        install = Install(round=ROUNDS, lineage="again", state="state 1 1", source="checkpoint", parent=first)
        run.write(peer, install)
    run.round(ROUNDS)
    report = audit(run.files)
    assert report.findings.violations == []
    assert [stage.lost for stage in report.stages] == [0, 8 * (ROUNDS - 1)]


def test_a_synchronous_stage_that_began_again_is_found(tmp_path: Path) -> None:
    """Each of the stage's rounds is whole, but the stage lacks microbatches from which other stages had learnt
    before."""
    run = honest_run(tmp_path)
    run.lineages[1] = "again"
    for peer in run.members(1):
        run.write(peer, start(peer, 1, "synchronous"))
        run.write(peer, Install(round=ROUNDS, lineage="again", state="initial", source="initial", parent="genesis 1"))
    run.round(ROUNDS)
    assert any("with an older state" in violation for violation in audit(run.files).findings.violations)
