"""The audit finds microbatches that count twice, or not at all, or that were never acknowledged."""

from pathlib import Path

import pytest

from swarm.audit.audit import audit
from swarm.events import Ack, Close, Commit, Install, Step
from swarm.training.tally import EMPTY, Given
from swarm.types import Block
from tests.audit.honest import (
    BOTH,
    MOST_SAMPLES,
    ROUND_MICROBATCHES,
    ROUNDS,
    SAMPLES,
    HonestRun,
    Lines,
    edit,
    honest_run,
    one_violation,
)


@BOTH
def test_a_planted_duplicate_is_found(tmp_path: Path, setting: str) -> None:
    """The other member also accumulates and contributes the microbatch, and all figures agree with that."""
    run = HonestRun(tmp_path, setting)
    run.train("peer-1a", 3)
    run.round(0)
    report = audit(run.files)
    assert report.findings.duplicates == 1
    violation = next(line for line in report.findings.violations if "counts more than once" in line)
    assert violation.startswith("stage 1, round 0, microbatch 3: ")
    assert violation.endswith("(peer-1a.jsonl, peer-1b.jsonl)")
    assert one_violation(report, "said to hold") if setting == "synchronous" else True
    # Now the figures also include the microbatch, as if the program had counted it. The audit still finds it.
    edit(tmp_path / "peer-1a.jsonl", lambda lines: claim(lines, close={"samples": 10, "microbatches": "0 2-4 6"}))
    for peer in run.members(1):
        edit(tmp_path / f"{peer}.jsonl", lambda lines: claim(lines, commit={"samples": 18}))
    report = audit(run.files)
    assert report.findings.duplicates == 1
    assert len(report.findings.violations) == 1


def claim(lines: Lines, **figures: dict[str, object]) -> None:
    """Change what lines of these names say."""
    for line in lines:
        line |= figures.get(line["event"], {})
        if "samples" in figures.get(line["event"], {}) and "round_samples" in line:
            line["round_samples"] = line["samples"]
        if line["event"] == "step" and "close" in figures:
            line["samples"] = figures["close"]["samples"]


@BOTH
def test_what_is_accumulated_twice_at_one_peer_is_found(tmp_path: Path, setting: str) -> None:
    run = HonestRun(tmp_path, setting)
    run.accumulate("peer-0a", 2)
    run.round(0)
    report = audit(run.files)
    assert report.findings.duplicates == 1
    assert any("microbatch 2" in line and "counts more than once" in line for line in report.findings.violations)


def test_a_planted_loss_is_found(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    edit(tmp_path / "peer-1b.jsonl", lambda lines: [line for line in lines if line.get("microbatch") != 11])
    report = audit(run.files)
    assert report.findings.missing == 1
    assert one_violation(report, "missing").startswith("stage 1, round 1, microbatch 11: missing in a committed round")
    one_violation(report, "said to hold 9 11 13 15, not 9 13 15")


@pytest.mark.parametrize("downloads", [True, False], ids=["downloads", "applies the result"])
@pytest.mark.parametrize("said", [4, 6])
def test_what_one_learnt_while_it_was_away_may_count_later(tmp_path: Path, *, downloads: bool, said: int) -> None:
    run = HonestRun(tmp_path, "diloco")
    run.round(0)
    for microbatch in (8, 9, 10, 11, 16, 18):
        run.write("trainer", Ack(microbatch=microbatch))
    run.train("peer-1b", 9)
    run.train("peer-1b", 11)
    run.write("peer-1b", Step(bucket=run.bucket, samples=4))
    run.bucket += 1
    others = {"peer-0a": 8, "peer-0b": 10, "peer-1a": 8}
    for peer, microbatch in others.items():
        run.train(peer, microbatch)
    parent = run.lineages[1]
    run.average(1, {peer: [microbatch] for peer, microbatch in others.items()})
    if downloads:
        state = Install(round=2, lineage=run.lineages[1], state="state 1 2", source="download", carried=said)
        run.write("peer-1b", state)
    else:
        run.write("peer-1b", Close(round=1, samples=4, round_samples=4, fragment=0))
        run.write(
            "peer-1b",
            Commit(
                round=1, parent=parent, lineage=run.lineages[1], digest="digest 1.1", attempt=1, samples=2,
                members=("peer-1a",), carried=said,
            ),
        )  # fmt: skip
    for peer, microbatch in others.items():
        run.train(peer, microbatch + 8)
    later = {peer: [microbatch + 8] for peer, microbatch in others.items()}
    run.average(2, later | {"peer-1b": [9, 11]}, stepped={"peer-1b"})
    report = audit(run.files)
    if said == 4:
        assert report.findings.violations == []
        assert report.findings.duplicates == 0
    else:
        assert "6 samples were carried over, and 4 learnt from" in one_violation(report, "carried over")


@pytest.mark.parametrize("said", [2, 4])
def test_what_was_learnt_after_the_closing_that_is_committed_is_carried_over(tmp_path: Path, said: int) -> None:
    """A member prepares a result and hears no more of its leader. It trains, and closes once more before it applies
    that result."""
    run = HonestRun(tmp_path, "diloco")
    run.round(0)
    run.write("trainer", Ack(microbatch=9))
    learnt_since: Lines = [
        {"event": "abort", "round": 0, "attempt": 1, "leader": "peer-1a", "reason": "the leader is silent"},
        {"event": "accumulate", "microbatch": 9, "samples": 2, "bucket": 100},
        {"event": "ack", "microbatch": 9},
        {"event": "step", "bucket": 100, "samples": 2},
        {"event": "close", "round": 0, "samples": 10, "round_samples": 10, "fragment": 0},
    ]

    def insert(lines: Lines) -> Lines:
        place = [line["event"] for line in lines].index("prepare") + 1
        times = {"time": lines[place]["time"], "monotonic": lines[place]["monotonic"]}
        lines[place]["carried"] = said
        return [*lines[:place], *(times | line for line in learnt_since), *lines[place:]]

    edit(tmp_path / "peer-1b.jsonl", insert)
    for peer, microbatch in {"peer-0a": 8, "peer-0b": 9, "peer-1a": 8}.items():
        run.train(peer, microbatch)
    run.write("trainer", Ack(microbatch=8))
    run.average(1, {"peer-0a": [8], "peer-0b": [9], "peer-1a": [8], "peer-1b": [9]}, stepped={"peer-1b"})
    report = audit(run.files)
    if said == 2:
        assert report.findings.violations == []
        assert (report.findings.duplicates, report.findings.missing) == (0, 0)
    else:
        assert any("4 samples were carried over, and 2 came after" in line for line in report.findings.violations)


def test_with_diloco_a_loss_is_a_share(tmp_path: Path) -> None:
    run = HonestRun(tmp_path, "diloco")
    run.write("trainer", Ack(microbatch=100))
    run.train("peer-0a", 100)
    run.accumulate("peer-1b", 100)
    run.roll_back("peer-1b", 100)
    run.round(0)
    edit(tmp_path / "peer-0a.jsonl", lambda lines: claim(lines, close={"samples": 10}))
    for peer in run.members(0):
        edit(tmp_path / f"{peer}.jsonl", lambda lines: claim(lines, commit={"samples": 18}))
    report = audit(run.files)
    assert report.findings.violations == []
    assert [stage.lost for stage in report.stages] == [0, 1]
    assert report.lost_share == pytest.approx(0.5 / 9)


@pytest.mark.parametrize("said", [0, 2])
def test_with_diloco_a_member_counts_for_no_more_than_it_can(tmp_path: Path, said: int) -> None:
    """A stage that waits for another one goes on learning: its peers then have several rounds' samples."""
    run = HonestRun(tmp_path, "diloco")
    ids = range(MOST_SAMPLES // SAMPLES + 4)
    for microbatch in ids:
        run.write("trainer", Ack(microbatch=microbatch))
        for peer in ("peer-0a", "peer-1a"):
            run.train(peer, microbatch)
    run.average(0, {"peer-0a": ids, "peer-1a": ids})
    for stage in range(2) if said else ():
        edit(tmp_path / f"peer-{stage}a.jsonl", lambda lines: claim(lines, commit={"samples": MOST_SAMPLES + said}))
    violations = audit(run.files).findings.violations
    assert len([line for line in violations if f"its members gave {MOST_SAMPLES}" in line]) == len(violations)
    assert bool(violations) == bool(said)


def test_what_a_living_peer_still_holds_is_not_lost(tmp_path: Path) -> None:
    run = HonestRun(tmp_path, "diloco")
    run.round(0)
    run.write("trainer", Ack(microbatch=8))
    for stage in range(2):
        run.train(run.members(stage)[0], 8)
    assert audit(run.files).lost_share == 0.0


def test_with_diloco_a_microbatch_of_an_earlier_round_is_found(tmp_path: Path) -> None:
    run = HonestRun(tmp_path, "diloco")
    run.round(0)
    run.train("peer-0b", 4)
    run.average(1, {"peer-0b": [4]})
    report = audit(run.files)
    assert report.findings.duplicates == 1
    assert one_violation(report, "earlier round").startswith("stage 0, round 1, microbatch 4: ")


def test_what_no_trainer_acknowledged_is_found(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    edit(tmp_path / "trainer.jsonl", lambda lines: [line for line in lines if line.get("microbatch") != 5])
    assert len([line for line in audit(run.files).findings.violations if "no trainer acknowledged" in line]) == 2


@BOTH
def test_what_enters_a_step_unacknowledged_is_found(tmp_path: Path, setting: str) -> None:
    run = honest_run(tmp_path, setting)
    edit(
        tmp_path / "peer-0a.jsonl",
        lambda lines: [line for line in lines if (line["event"], line.get("microbatch")) != ("ack", 2)],
    )
    assert "microbatch 2" in one_violation(audit(run.files), "before it was acknowledged")


def _count(run: HonestRun, *, planted: int = 0, by_all: bool = False) -> None:
    """Let all peers of an honest run have said what members gave, and the tally. In round 1 peer-0a, or each of its
    stage, adds some samples to the sums that it says, and with `by_all` to those of the round as well."""
    for stage in range(2):
        for peer in run.members(stage):

            def count(lines: Lines, peer: str = peer) -> None:
                tally = EMPTY
                for line in (line for line in lines if line["event"] == "commit"):
                    more = planted * (
                        line["round"] == 1 and peer in (("peer-0a", "peer-0b") if by_all else ("peer-0a",))
                    )
                    samples = line["samples"] // 2
                    rows = [[samples + more, 10 * samples, 100], [samples, 10 * samples, 100]]
                    given = {
                        peer: Given(row[0], row[1], row[2], 1) for peer, row in zip(line["members"], rows, strict=True)
                    }
                    tally = tally.after(line["round"], parent="", result="", given=given)
                    line["given"] = rows if by_all else [[samples, 10 * samples, 100]] * 2
                    line["tally"] = tally.digest

            edit(run.folder / f"{peer}.jsonl", count)


def test_the_audit_adds_up_what_members_gave(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    _count(run)
    report = audit(run.files)
    assert report.proven, report.findings.violations
    samples = ROUNDS * ROUND_MICROBATCHES * SAMPLES // 2
    assert report.tallies[Block(1)].peers == {
        peer: Given(samples, 10 * samples, ROUNDS * 100, ROUNDS) for peer in run.members(1)
    }


def test_a_planted_false_sum_is_found(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    _count(run, planted=1)
    found = audit(run.files).findings.violations
    assert [line[: line.index(": ")] for line in found] == ["stage 0, round 1", "stage 0, round 2"]
    assert all("its tally is not what the rounds add up to" in line for line in found)


def test_counts_that_all_members_state_falsely_are_found(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    _count(run, planted=1, by_all=True)
    (found,) = audit(run.files).findings.violations
    assert "its tally has 9 samples of peer-0a, which gave 8" in found


def test_peers_that_state_different_counts_are_found(tmp_path: Path) -> None:
    run = honest_run(tmp_path)
    _count(run)

    def exaggerate(lines: Lines) -> None:
        next(line for line in lines if line["event"] == "commit")["given"][0][2] += 1

    edit(tmp_path / "peer-1b.jsonl", exaggerate)
    assert one_violation(audit(run.files), "two peers give one lineage different contents")
