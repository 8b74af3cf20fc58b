"""Writes the event logs of a run without faults, line by line. Tests change the logs, and then audit them.

Two stages with two peers each and one trainer. Stage 0's first peer is the leader of its stage, and so on.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from swarm.audit.audit import Report
from swarm.events import (
    Abort,
    Accumulate,
    Ack,
    Begin,
    Close,
    Commit,
    Event,
    EventLog,
    Install,
    Prepare,
    RollBack,
    Start,
    State,
    Step,
    ranges,
)
from swarm.training.run_rounds import next_lineage
from swarm.types import Block
from tests.support.manual_clock import ManualClock

SAMPLES = 2
ROUND_MICROBATCHES = 8
MOST_SAMPLES = 2 * SAMPLES * ROUND_MICROBATCHES
NUM_STAGES = 2
ROUNDS = 3
"""How many rounds an honest run has."""

BOTH = pytest.mark.parametrize("setting", ["synchronous", "diloco"])
"""For tests of both settings."""

Lines = list[dict[str, Any]]


def start(peer: str, stage: int, setting: str) -> Start:
    """Make a process's first event."""
    return Start(
        run="run.1", peer=peer, name=peer, stage=stage, setting=setting, num_stages=NUM_STAGES, num_fragments=1,
        round_microbatches=ROUND_MICROBATCHES, most_samples=MOST_SAMPLES, software="0", pid=1, boot="boot",
    )  # fmt: skip


class HonestRun:
    """Writes the files of a run to a folder: peer-0a, peer-0b, peer-1a, peer-1b and trainer, with `.jsonl`."""

    def __init__(self, folder: Path, setting: str = "synchronous", *, has_span: bool = False) -> None:
        """`has_span` says whether one process is the first peer of both stages: its log has the events of both."""
        self.folder = folder
        self._processes = {"peer-1a": "peer-0a"} if has_span else {}
        """The processes of peers that have none of their own."""
        self.setting = setting
        self.clock = ManualClock(start=100.0)
        self.lineages = [f"genesis {stage}" for stage in range(NUM_STAGES)]
        self._logs: dict[str, EventLog] = {}
        self.bucket = 0
        folder.mkdir(exist_ok=True)
        self.write("trainer", start("trainer", -1, setting))
        for stage in range(NUM_STAGES):
            for peer in self.members(stage):
                if peer not in self._processes:
                    self.write(peer, start(peer, stage, setting))
                self.write(peer, Install(round=0, lineage=self.lineages[stage], state="initial", source="initial"))

    @staticmethod
    def members(stage: int) -> tuple[str, str]:
        """The peers of a stage."""
        return f"peer-{stage}a", f"peer-{stage}b"

    @property
    def files(self) -> list[Path]:
        """All logs."""
        return sorted(self.folder.iterdir())

    def write(self, peer: str, event: Event, block: Block | None = None) -> None:
        """Write one event of one peer, about the block that it serves at first, unless another one is given."""
        if peer != "trainer" and not isinstance(event, Start):
            block = block or Block(int(peer[5]))
        name = self._processes.get(peer, peer)
        if name not in self._logs:
            self._logs[name] = EventLog(self.folder / f"{name}.jsonl", self.clock)
        self.clock.advance(0.001)
        self._logs[name].write(event, block)

    def _ids(self, members: Sequence[str]) -> tuple[str, ...]:
        return tuple(self._processes.get(peer, peer) for peer in members)

    def reopen(self, name: str) -> None:
        """Begin another process in the same file."""
        self._logs.pop(name).close()

    def train(self, peer: str, microbatch: int, *, only_at: int | None = None) -> None:
        """Write that a microbatch was accumulated and acknowledged."""
        self.accumulate(peer, microbatch, only_at=only_at)
        self.write(peer, Ack(microbatch=microbatch))

    def accumulate(self, peer: str, microbatch: int, *, only_at: int | None = None) -> None:
        """Write that a microbatch was accumulated; a replay goes into a bucket of its own."""
        bucket = self.bucket + (only_at is not None)
        self.write(peer, Accumulate(microbatch=microbatch, samples=SAMPLES, bucket=bucket, only_at=only_at))

    def roll_back(self, peer: str, microbatch: int) -> None:
        """Write that a microbatch was subtracted again."""
        self.write(peer, RollBack(microbatch=microbatch, samples=SAMPLES, bucket=self.bucket))

    def round(self, number: int, *, replayed: Sequence[tuple[int, int]] = (), lost: Collection[str] = ()) -> None:
        """Write a whole round, in which each member has every other microbatch, some of them as replays of a stage.

        Args:
            lost: members that did not get the result, because they had promised another attempt when the others
                committed.
        """
        ids = range(number * ROUND_MICROBATCHES, (number + 1) * ROUND_MICROBATCHES)
        for microbatch in ids:
            self.write("trainer", Ack(microbatch=microbatch))
            for stage in range(NUM_STAGES):
                only_at = stage if (stage, microbatch) in replayed else None
                self.train(self.members(stage)[microbatch % 2], microbatch, only_at=only_at)
        given = {peer: ids[nth::2] for s in range(NUM_STAGES) for nth, peer in enumerate(self.members(s))}
        self.average(number, given, lost=lost)

    def average(
        self, number: int, contributions: Mapping[str, Sequence[int]], *, stepped: Collection[str] = (),
        lost: Collection[str] = (), silent: Collection[str] = (), attempt: int = 1,
    ) -> None:  # fmt: skip
        """Write that every stage averages what its members say they have, and commits.

        Args:
            stepped: members that have already taken an inner step with what they contribute.
            silent: members that write nothing of this.
        """
        if self.setting == "diloco":
            for peer, ids in contributions.items():
                if peer in stepped:
                    continue
                self.write(peer, Step(bucket=self.bucket, samples=SAMPLES * len(ids)))
        stages = [[peer for peer in self.members(s) if peer in contributions] for s in range(NUM_STAGES)]
        for stage, members in enumerate(stages):
            for peer in [peer for peer in members if peer not in silent]:
                self.promise(peer, stage, number, contributions[peer], attempt=attempt, leader=members[0])
                if peer in lost:
                    self.write(peer, Abort(round=number, attempt=1, leader=members[0], reason="the line broke"))
                    others = contributions[members[0]]
                    self.train(peer, others[0])
                    held = [others[0], *contributions[peer]]
                    self.promise(peer, stage, number, held, attempt=2, leader=members[0])
        totals = [sum(min(MOST_SAMPLES, SAMPLES * len(contributions[p])) for p in members) for members in stages]
        for stage, members in enumerate(stages):
            for peer in [peer for peer in members if peer not in {*lost, *silent}]:
                self.write(
                    peer,
                    Prepare(
                        round=number, lineage=self.lineages[stage], attempt=attempt, leader=members[0],
                        digest=f"digest {number}.{attempt}", samples=totals[stage], members=self._ids(members),
                    ),
                )  # fmt: skip
        for stage, members in enumerate(stages):
            parent, digest = self.lineages[stage], f"digest {number}.{attempt}"
            self.lineages[stage] = next_lineage(
                parent, number, digest, self._ids(members), total_squared_norm=0.0, partners=()
            )
            for peer in [peer for peer in members if peer not in silent]:
                self.write(
                    peer,
                    Commit(
                        round=number, parent=parent, lineage=self.lineages[stage], digest=digest, attempt=attempt,
                        samples=totals[stage], members=self._ids(members),
                    ),
                )  # fmt: skip
                reached, lineage = number + 1, self.lineages[stage]
                self.write(peer, State(round=reached, lineage=lineage, digest=f"state {stage} {reached}"))
        self.bucket += 1

    def promise(self, peer: str, stage: int, number: int, ids: Sequence[int], *, attempt: int, leader: str) -> None:
        samples, named = SAMPLES * len(ids), ranges(ids) if self.setting == "synchronous" else ""
        self.write(peer, Close(round=number, samples=samples, round_samples=samples, fragment=0, microbatches=named))
        self.write(peer, Begin(round=number, lineage=self.lineages[stage], attempt=attempt, leader=leader))


def edit(path: Path, change: Callable[[Lines], Lines | None]) -> None:
    """Rewrite a file's lines; `change` may do so in place."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = change(lines) or lines
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))


def edit_first(path: Path, event: str, changes: Mapping[str, object]) -> int:
    """Change the first line of an event's kind, and return the line's number."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    place = next(place for place, line in enumerate(lines) if line["event"] == event)
    edit(path, lambda lines: lines[place].update(changes) or lines)
    return place + 1


def honest_run(folder: Path, setting: str = "synchronous", *, has_span: bool = False) -> HonestRun:
    """Three rounds, without a fault."""
    run = HonestRun(folder, setting, has_span=has_span)
    for number in range(ROUNDS):
        run.round(number)
    return run


def one_violation(report: Report, text: str) -> str:
    """The only violation in the report. Asserts that it has this text."""
    (found,) = [violation for violation in report.findings.violations if text in violation]
    assert not report.proven
    return found
