"""Judges from a run's event logs whether its microbatches counted as docs/fault-model.md promises.

    files -> history (the lines of one each, with its holdings) -> committed_rounds (all together) -> verdict

Recomputes every figure that can be recomputed. Files are read side by side, and the next line is always taken from the
file that has come least far in the run. So only the rounds between the slowest file and the fastest one are in memory.
Of a committed round only ranges of ids are kept.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.audit import history, verdict
from swarm.audit.committed_rounds import CommittedRounds
from swarm.audit.findings import Findings
from swarm.audit.history import History, Line
from swarm.audit.verdict import Report
from swarm.events.kinds import Install, Start
from swarm.types import TRAINER_STAGE


@dataclass(frozen=True, eq=False)
class _Reading:
    path: Path
    lines: Iterator[Line]
    history: History


def audit(paths: Sequence[Path]) -> Report:
    """Read the event logs of all processes of a run, including trainers and dead peers, and give the audit's report.

    Raises:
        ValueError: a file is no event log, is damaged, or is of another run; or there is nothing to judge.
        OSError: a file cannot be read.
    """
    findings = Findings()
    rounds = CommittedRounds(findings)
    first: tuple[Path, Start] | None = None
    num_named = Counter(path.name for path in paths)
    # In the findings a file goes by its name, or by its path if another has the same name.
    called = {path: path.name if num_named[path.name] == 1 else str(path) for path in paths}
    readings = [_Reading(path, history.read(path), History(called[path], findings, rounds)) for path in paths]
    order = [(0, number) for number in range(len(readings))]
    seen: set[int] = set()
    """Stages at which some process was; TRAINER_STAGE stands for trainers."""
    while order:
        _, number = heapq.heappop(order)
        reading = readings[number]
        position = reading.history.round
        for line in reading.lines:
            if isinstance(line.event, Start):
                first = first or (reading.path, line.event)
                _check_same_run(reading.path, line.event, *first)
            reading.history.feed(line)
            # A stage counts as seen only once a process has installed a state there.
            if isinstance(line.event, Install) or reading.history.stage == TRAINER_STAGE:
                seen.add(reading.history.stage)
            if reading.history.round > position:
                heapq.heappush(order, (reading.history.round, number))
                break
        else:
            reading.history.finish()
    if first is None:
        raise ValueError("the files hold no events: name the files that --events wrote")
    return verdict.judge(first[1], rounds, findings, files=len(paths), seen=seen)


def _check_same_run(path: Path, start: Start, first_path: Path, first: Start) -> None:
    if start.run != first.run:
        raise ValueError(f"{path} is of run {start.run}, and {first_path} of run {first.run}")
