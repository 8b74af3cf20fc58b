"""Judges from a run's event logs whether its microbatches counted as docs/fault-model.md promises.

    files -> history (the lines of one each, with its holdings) -> committed_rounds (all together) -> judge

exactly once    synchronous: a committed round holds all its microbatches, at every stage, and no stage is ahead
at most once    no microbatch is in two rounds of one branch; with DiLoCo the report gives the share that is in none

Every figure that can be recomputed is. Files are read side by side, and the next line is always taken from the
file that has come least far in the run. So only the rounds between the slowest file and the fastest one are in memory.
Of a committed round only ranges of ids are kept.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from swarm.audit import history
from swarm.audit.committed_rounds import TRAINER_BLOCK, CommittedRound, CommittedRounds, Findings
from swarm.audit.history import History, Line
from swarm.audit.id_set import IdSet
from swarm.events import Install, Start
from swarm.training.tally import EMPTY, Given, Tally
from swarm.types import Block

_MOST_OF_ROUND = 1 << 20
"""No round has more microbatches than these. Without a bound, one forged number would keep an audit busy for years."""


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One block's committed rounds, on the branch that has come farthest."""

    stage: int
    variant: int
    rounds: int
    first_attempt: int
    """How many of these rounds succeeded in their first attempt."""
    microbatches: int
    """The number of microbatches in these rounds. With fragments it is the mean over the fragments."""
    lost: int
    """DiLoCo: microbatches that were acknowledged somewhere, but are in no round of this block on their path."""


@dataclass(frozen=True, kw_only=True)
class Report:
    run: str
    setting: str
    files: int
    findings: Findings
    rounds_committed: int
    """Rounds that all stages have committed, on whatever branches."""
    rounds_aborted: int
    """Attempts that came to nothing, at all stages."""
    replayed: int
    """Microbatches of committed rounds that were accumulated at one stage alone."""
    lost_share: float
    """The share of acknowledged microbatches that are lost, over all blocks on their paths. What living peers held at
    the end does not count as lost."""
    stages: tuple[StageReport, ...]
    tallies: Mapping[Block, Tally]
    """What each peer gave to the rounds of each block, on the branch that came farthest."""

    @property
    def proven(self) -> bool:
        return not self.findings.num_violations

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object, in which the findings are figures like the others."""
        figures = {name: value for name, value in vars(self).items() if name not in ("findings", "tallies")}
        figures["stages"] = tuple(map(asdict, self.stages))
        return figures | asdict(self.findings) | {"proven": self.proven}


def judge(start: Start, rounds: CommittedRounds, *, files: int, seen: Set[Block]) -> Report:
    """Give the report, after the checks that need all files. Some file has events of each block in `seen`."""
    rounds.settle()
    _check_all_seen(start, seen, rounds.findings)
    for round_, silent in rounds.unmerged():
        round_.violation(f"no file tells what {', '.join(peer[:8] for peer in silent)} contributed")
    for round_ in rounds.rounds.values():
        if round_.microbatches is None:
            continue
        unknown = round_.microbatches.without(rounds.acknowledged_by_trainers)
        if unknown and TRAINER_BLOCK in seen:
            round_.violation("counts, but no trainer acknowledged it", list(unknown))
        if start.setting == "synchronous":
            wanted = rounds.indices(round_, start.round_microbatches)
            _check_complete(round_, round_.microbatches, wanted, start)
    if start.setting == "synchronous":
        _check_together(start, rounds)
    branches = {block: _main_branch(block, start, rounds) for block in start.blocks}
    acknowledged = _acknowledged(rounds, start)
    if start.setting == "synchronous":
        _check_amended(branches.values())
    reports = [_stage_report(block, branch, start, rounds, acknowledged[block]) for block, branch in branches.items()]
    num_acknowledged = sum(map(len, acknowledged.values()))
    committed: dict[Block, set[int]] = {block: set() for block in branches}
    for (block, _), round_ in rounds.rounds.items():
        if block in committed:  # A forged log may have a trainer commit something.
            committed[block].add(round_.number)
    return Report(
        run=start.run, setting=start.setting, files=files, findings=rounds.findings,
        rounds_committed=len(set.intersection(*committed.values())), rounds_aborted=rounds.num_aborted(),
        replayed=sum(r.num_replayed for branch in branches.values() for r in branch),
        lost_share=sum(report.lost for report in reports) / max(1, num_acknowledged),
        stages=tuple(reports), tallies={block: _tally(branch) for block, branch in branches.items()},
    )  # fmt: skip


def _acknowledged(rounds: CommittedRounds, start: Start) -> dict[Block, IdSet]:
    ids = rounds.acknowledged_by_stages.copy()
    ids.update(rounds.acknowledged_by_trainers)
    if not start.paths:
        return dict.fromkeys(start.blocks, ids)
    return {block: IdSet(index for index in ids if start.passes(index, block)) for block in start.blocks}


def _check_all_seen(start: Start, seen: Set[Block], findings: Findings) -> None:
    """Note a violation for each block without a file, and for trainers without one: nothing is proven about them."""
    if TRAINER_BLOCK not in seen:
        findings.violation("no file of any was given, so nothing tells what they acknowledged", block=TRAINER_BLOCK)
    for block in start.blocks:
        if block not in seen:
            findings.violation("no file of any of its peers was given", block=block)


# -- each round --------------------------------------------------------------------------------------------------------


def _check_complete(round_: CommittedRound, microbatches: IdSet, indices: range, start: Start) -> None:
    if indices.stop - indices.start > _MOST_OF_ROUND:
        round_.violation(f"is said to have more than {_MOST_OF_ROUND} microbatches")
        return
    wanted = IdSet(index for index in indices if start.passes(index, round_.block))
    if missing := wanted.without(microbatches):
        round_.findings.missing += len(missing)
        round_.violation("missing in a committed round", list(missing))
    if others := microbatches.without(wanted):
        round_.violation("counts in a round that is not its own", list(others))


def _check_amended(branches: Iterable[Sequence[CommittedRound]]) -> None:
    first: dict[int, CommittedRound] = {}
    for round_ in chain.from_iterable(branches):
        other = first.setdefault(round_.number, round_)
        same = "amended", "next_microbatch"
        if any(getattr(other.event, name) != getattr(round_.event, name) for name in same):
            files = round_.files | other.files
            round_.violation(f"was amended otherwise than at stage {other.block}", files=files)


def _check_together(start: Start, rounds: CommittedRounds) -> None:
    decided: dict[tuple[Block, int], list[Mapping[str, float]]] = defaultdict(list)
    for block, number, at in rounds.decided():
        decided[block, number].append(at)
    for round_ in rounds.rounds.values():
        for other in start.blocks:
            results = decided.get((other, round_.number), [])
            # Only times of one boot of one machine can be compared.
            if not any(
                all(at.get(boot, seconds) <= seconds for boot, seconds in round_.committed_at.items()) for at in results
            ):
                round_.violation(f"committed before stage {other} held its result")


# -- branches ----------------------------------------------------------------------------------------------------------


def _main_branch(block: Block, start: Start, rounds: CommittedRounds) -> list[CommittedRound]:
    """Find the branch of a block that has come farthest, and note what counts twice on any branch."""
    children: dict[str, list[CommittedRound]] = defaultdict(list)
    for (at, _), round_ in rounds.rounds.items():
        if at == block:
            parent = round_.event.parent
            children[rounds.renamed.get((block, parent), parent)].append(round_)
    reached = {round_.event.lineage for led_to in children.values() for round_ in led_to}
    best: list[CommittedRound] = []
    most = (0, 0)
    for root in [parent for parent in children if parent not in reached]:
        if (block, root) not in rounds.beginnings:
            for round_ in children[root]:
                round_.violation("follows from a state of which no file tells how it came about")
        for samples, branch in _branches(root, children, start):
            # The number of rounds decides before that of samples: a stage that lost all its peers begins again at the
            # present round, with fewer samples.
            if (reached_round := (branch[-1].number + 1, samples)) > most:
                most, best = reached_round, branch
    return best


def _branches(
    root: str, children: Mapping[str, list[CommittedRound]], start: Start
) -> Iterator[tuple[int, list[CommittedRound]]]:
    """Yield every path from the lineage `root` to an end, with the number of samples on it."""
    open_: list[tuple[str, int, list[CommittedRound], list[IdSet]]] = [
        (root, 0, [], [IdSet() for _ in range(start.num_fragments)])
    ]
    while open_:
        lineage, samples, branch, counted = open_.pop()
        while len(following := children.get(lineage, [])) == 1:
            lineage, samples = following[0].event.lineage, samples + following[0].event.samples
            branch.append(following[0])
            _count(following[0], counted)
        if not following:
            yield samples, branch
        for round_ in following:
            copies = [ids.copy() for ids in counted]
            _count(round_, copies)
            open_.append((round_.event.lineage, samples + round_.event.samples, [*branch, round_], copies))


def _count(round_: CommittedRound, counted: list[IdSet]) -> None:
    if round_.microbatches is None:
        return
    before = counted[round_.number % len(counted)]
    if again := before.common(round_.microbatches):
        round_.findings.duplicates += len(again)
        round_.violation("counts in an earlier round of the branch as well", list(again))
    before.update(round_.microbatches)


def _stage_report(
    block: Block, branch: list[CommittedRound], start: Start, rounds: CommittedRounds, acknowledged: IdSet
) -> StageReport:
    counted = [IdSet() for _ in range(start.num_fragments)]
    for round_ in branch:
        if round_.microbatches is not None:
            counted[round_.number % len(counted)].update(round_.microbatches)
    lost = 0
    if start.setting != "synchronous":
        newest = max((round_.number + 1 for round_ in branch), default=0)
        for fragment, ids in enumerate(counted):
            ids_or_held = ids.copy()
            ids_or_held.update(rounds.held_back(block, fragment, newest))
            lost += len(acknowledged.without(ids_or_held))
    return StageReport(
        stage=block.stage,
        variant=block.variant,
        rounds=len(branch),
        first_attempt=sum(map(rounds.is_first_attempt, branch)),
        microbatches=sum(map(len, counted)) // len(counted),
        lost=lost // len(counted),
    )


def _tally(branch: Sequence[CommittedRound]) -> Tally:
    """Add up what members gave to the rounds of a branch, and compare it with what peers had as the tally after each,
    if all that is in it is in the files."""
    tallies: dict[int, Tally] = {}
    for start in sorted({0, *(since for round_ in branch for since, _ in round_.tallies)}):
        tally = EMPTY
        for round_ in branch[sum(round_.number < start for round_ in branch) :]:
            event = round_.event
            given = {peer: Given(*row, 1) for peer, row in zip(event.members, event.given, strict=False)}
            tally = tally.after(round_.number, parent=event.parent, result=event.digest, given=given)
            if any(since == start == tally.since and digest != tally.digest for since, digest in round_.tallies):
                round_.violation("its tally is not what the rounds add up to")
        tallies[start] = tally
    return tallies[0]


@dataclass(frozen=True, eq=False)
class _Reading:
    path: Path
    lines: Iterator[Line]
    history: History


def audit(paths: Sequence[Path]) -> Report:
    """Read the event logs of all processes of a run, including trainers and dead peers, and give the audit's report.
    Raises ValueError if a file is no event log, is damaged, or is of another run, or there is nothing to judge, and
    OSError if a file cannot be read."""
    rounds = CommittedRounds()
    first: tuple[Path, Start] | None = None
    num_named = Counter(path.name for path in paths)
    # In the findings a file goes by its name, or by its path if another has the same name.
    called = {path: path.name if num_named[path.name] == 1 else str(path) for path in paths}
    readings = [_Reading(path, history.read(path), History(called[path], rounds)) for path in paths]
    order = [(0, number) for number in range(len(readings))]
    seen: set[Block] = set()
    """Blocks that some process served, and TRAINER_BLOCK for trainers."""
    while order:
        _, number = heapq.heappop(order)
        reading = readings[number]
        position = reading.history.round
        for line in reading.lines:
            if isinstance(line.event, Start):
                first = first or (reading.path, line.event)
                _check_same_run(reading.path, line.event, *first)
            reading.history.feed(line)
            block = reading.history.block_of(line)
            # A block counts as seen only once a process has installed a state there.
            if isinstance(line.event, Install) or block == TRAINER_BLOCK:
                seen.add(block)
            if reading.history.round > position:
                heapq.heappush(order, (reading.history.round, number))
                break
        else:
            reading.history.finish()
    if first is None:
        raise ValueError("the files hold no events: name the files that --events wrote")
    return judge(first[1], rounds, files=len(paths), seen=seen)


def _check_same_run(path: Path, start: Start, first_path: Path, first: Start) -> None:
    if start.run != first.run:
        raise ValueError(f"{path} is of run {start.run}, and {first_path} of run {first.run}")
    of_run = "setting", "num_stages", "num_fragments", "round_microbatches", "paths"
    if any(getattr(start, name) != getattr(first, name) for name in of_run):
        raise ValueError(f"{path} and {first_path} tell different things about run {start.run}: one of them is forged")
