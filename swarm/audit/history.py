"""One process's events, followed in order: what is in its buckets, what it contributes, where it stands.

Fed by audit/audit with the lines of one file. Recomputes what each contribution must hold from what was accumulated,
rolled back and stepped with, and hands contributions, commits and states on to audit/committed_rounds. Remembers only
what is open: buckets, inner steps that no round has taken yet, and the attempts of the present round.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from swarm.audit.committed_rounds import CommittedRounds, Contribution
from swarm.audit.findings import Findings
from swarm.audit.log_file import Line
from swarm.events.kinds import (
    Abort,
    Accumulate,
    Ack,
    Begin,
    Close,
    Commit,
    Event,
    Gap,
    Hop,
    Install,
    Move,
    Prepare,
    RollBack,
    Start,
    State,
    Step,
    ranges,
)
from swarm.training.lineage import next_lineage


@dataclass(eq=False)
class _Bucket:
    """Microbatches whose gradients are in it, each as often as it was added."""

    counts: Counter[int] = field(default_factory=Counter)
    acked: set[int] = field(default_factory=set)
    replays: set[int] = field(default_factory=set)
    samples: int = 0

    @property
    def ids(self) -> set[int]:
        return {index for index, count in self.counts.items() if count > 0}


@dataclass(frozen=True, eq=False)
class _Step:
    """An inner step, numbered from 1 within a process, and what it was taken with."""

    number: int
    counts: Counter[int]
    samples: int


@dataclass(frozen=True, eq=False)
class _Closing:
    """A contribution: the microbatches in it, and the last inner step that is."""

    round: int
    fragment: int
    counts: Counter[int]
    replays: frozenset[int]
    round_samples: int
    last_step: int


class History:
    """One file."""

    def __init__(self, name: str, findings: Findings, rounds: CommittedRounds) -> None:
        self.name = name
        self.start: Start | None = None
        self._findings = findings
        self._rounds = rounds
        self._begin_life(-1)

    def _begin_life(self, stage: int) -> None:
        """A process begins with nothing, or a moved one does."""
        self.stage = stage
        self.round = 0
        """Where it stands."""
        self._entered_round = 0
        """Where it began, or took over another state."""
        self._lineage: str | None = None
        self._buckets: dict[int, _Bucket] = {}
        self._highest_bucket = -1
        self._steps: list[_Step] = []
        self._num_steps = 0
        self._bases = [0] * (self.start.num_fragments if self.start else 1)
        """By fragment, the last inner step whose share of it was averaged, or lost."""
        self._stepped_samples = 0
        """Of inner steps that count towards the round."""
        self._closing: _Closing | None = None
        self._begun: tuple[int, str] | None = None
        self._attempts: set[int] = set()
        """Begun in the present round."""

    @property
    def _synchronous(self) -> bool:
        return self.start is not None and self.start.setting == "synchronous"

    def feed(self, line: Line) -> None:
        """The next event."""
        self._findings.num_events += 1
        event: Event = line.event
        match event:
            case Start():
                self._end_life()
                self.start = event
                self._begin_life(event.stage)
            case Move():
                self._end_life()
                self._begin_life(event.stage)
            case Gap():
                self._violation(f"{event.lost} events were not written, so nothing after them is proven")
            case Hop() if self.stage < 0:
                self.round = event.round
            case Accumulate():
                self._accumulate(event)
            case RollBack():
                self._roll_back(event)
            case Ack():
                self._ack(event)
            case Step():
                self._step(event)
            case Close():
                self._close(event)
            case Begin():
                self._promise(event, line)
            case Prepare():
                self._prepare(event, line)
            case Abort():
                self._rounds.given_up(self.stage, self._lineage or "", (event.attempt, event.leader))
            case Commit():
                self._commit(event, line)
            case State():
                self._rounds.stood(self.stage, event.round, event.lineage, event.digest, self.name)
            case Install():
                self._install(event)
            case _:
                pass

    def finish(self) -> None:
        """The file ends here."""
        self._end_life()

    # -- microbatches --------------------------------------------------------------------------------------------------

    def _accumulate(self, event: Accumulate) -> None:
        assert self.start is not None
        if self._synchronous and event.microbatch // self.start.round_microbatches != self.round:
            self._violation("accumulated in another round than its own", microbatches=[event.microbatch])
        if event.only_at not in (None, self.stage):
            self._violation(f"accumulated, though only stage {event.only_at} lacks it", microbatches=[event.microbatch])
        self._highest_bucket = max(self._highest_bucket, event.bucket)
        bucket = self._buckets.setdefault(event.bucket, _Bucket())
        bucket.counts[event.microbatch] += 1
        bucket.samples += event.samples
        if event.only_at is not None:
            bucket.replays.add(event.microbatch)

    def _roll_back(self, event: RollBack) -> None:
        self._findings.rolled_back += 1
        bucket = self._buckets.get(event.bucket)
        if bucket is None:
            if event.bucket > self._highest_bucket:
                self._violation("rolled back from a bucket that holds nothing", microbatches=[event.microbatch])
            return  # Of a round that is over, or of a state that was given up: it counts nowhere any more.
        if bucket.counts[event.microbatch] < 1:
            self._violation("rolled back, and was not accumulated", microbatches=[event.microbatch])
        bucket.counts[event.microbatch] -= 1
        bucket.samples -= event.samples
        bucket.acked.discard(event.microbatch)
        bucket.replays.discard(event.microbatch)

    def _ack(self, event: Ack) -> None:
        self._rounds.acknowledged(event.microbatch, by_trainer=self.stage < 0)
        if self.stage < 0:
            return
        for bucket in self._buckets.values():
            if bucket.counts[event.microbatch] > 0:
                bucket.acked.add(event.microbatch)
                return
        self._violation("acknowledged, and is in no bucket", microbatches=[event.microbatch])

    def _step(self, event: Step) -> None:
        bucket = self._buckets.pop(event.bucket, _Bucket())
        if tentative := bucket.ids - bucket.acked:
            self._violation("stepped with before it was acknowledged", microbatches=tentative)
        if bucket.samples != event.samples:
            self._violation(
                f"an inner step used {event.samples} samples, and {bucket.samples} were accumulated less rolled back"
            )
        self._num_steps += 1
        self._stepped_samples += event.samples
        self._steps.append(_Step(self._num_steps, +bucket.counts, bucket.samples))

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _close(self, event: Close) -> None:
        self._check_standing(event.round, None, "closed")
        if self._synchronous:
            buckets = self._buckets.values()
            counts, samples = _sum(+bucket.counts for bucket in buckets), sum(bucket.samples for bucket in buckets)
            round_samples, replays = samples, frozenset[int]().union(*(bucket.replays for bucket in buckets))
            if tentative := set(counts).difference(*(bucket.acked for bucket in buckets)):
                self._violation("contributed before it was acknowledged", microbatches=tentative)
            if ranges(counts) != event.microbatches:
                self._violation(f"the contribution is said to hold {event.microbatches}, not {ranges(counts)}")
        else:
            taken = [step for step in self._steps if step.number > self._bases[event.fragment]]
            counts, samples = _sum(step.counts for step in taken), sum(step.samples for step in taken)
            round_samples, replays = self._stepped_samples, frozenset()
        if (samples, round_samples) != (event.samples, event.round_samples):
            self._violation(
                f"the contribution is said to be of {event.samples} samples, {event.round_samples} of them of the "
                f"round; accumulated less rolled back are {samples} and {round_samples}"
            )
        self._closing = _Closing(event.round, event.fragment, counts, replays, round_samples, self._num_steps)

    def _promise(self, event: Begin, line: Line) -> None:
        self._check_standing(event.round, event.lineage, "took part in an attempt")
        self._begun = event.attempt, event.leader
        self._attempts.add(event.attempt)
        self._rounds.begun(self.stage, event.lineage, self._begun)
        if self._closing is not None and self._closing.round == event.round:
            self._rounds.offered(self._contribution(event, self._closing, line))

    def _contribution(self, event: Begin | Prepare, closing: _Closing, line: Line) -> Contribution:
        assert self.start is not None
        return Contribution(
            stage=self.stage, round=event.round, parent=event.lineage, peer=self.start.peer,
            ballot=(event.attempt, event.leader), fragment=closing.fragment, counts=closing.counts,
            replays=closing.replays, round_samples=closing.round_samples, file=self.name, boot=self.start.boot,
            monotonic=line.monotonic,
        )  # fmt: skip

    def _prepare(self, event: Prepare, line: Line) -> None:
        self._check_standing(event.round, event.lineage, "prepared a result")
        closing = self._closing
        if closing is None or closing.round != event.round or self._begun != (event.attempt, event.leader):
            self._violation("prepared the result of an attempt that it had not begun")
            return
        self._rounds.prepared(self._contribution(event, closing, line), event.digest, event.members)

    def _commit(self, event: Commit, line: Line) -> None:
        assert self.start is not None
        self._check_standing(event.round, event.parent, "committed")
        lineage = next_lineage(
            event.parent, event.round, event.digest, event.members, total_squared_norm=event.total_squared_norm,
            partners=event.partners,
        )  # fmt: skip
        if event.lineage != lineage:
            self._violation(f"lineage {event.lineage[:12]} does not follow from what was committed")
        # Of the round that it entered at, an earlier life may have taken part; then that one's file tells so. Whose own
        # part of an exchange failed never prepared its result, and takes it from the others if these commit it.
        took_part = event.attempt in self._attempts or event.round == self._entered_round
        if self.start.peer in event.members and not took_part:
            self._violation("committed a result as its member and had not begun its attempt")
        self._take_out(event)
        self._rounds.committed(
            self.stage, event, file=self.name, boot=self.start.boot, monotonic=line.monotonic,
            synchronous=self._synchronous,
        )  # fmt: skip
        self.round, self._lineage = event.round + 1, event.lineage
        self._end_round()

    def _end_round(self) -> None:
        self._closing, self._begun, self._attempts = None, None, set()

    def _take_out(self, event: Commit) -> None:
        """What the round took does not count towards a later one; nor does what was learnt in vain."""
        if self._synchronous:
            self._buckets.clear()
            return
        assert self.start is not None
        if event.carried and self.start.peer not in event.members:
            # Nothing of its own is in the result: it goes on with all that it has learnt.
            self._check_carried(event.carried)
            return
        fragment = event.round % len(self._bases)
        # What came after the last closing is carried over, or lost together with what came before it.
        last = self._closing.last_step if self._closing is not None else self._num_steps
        after = sum(step.samples for step in self._steps if step.number > last)
        if event.carried not in (0, after):
            self._violation(f"{event.carried} samples were carried over, and {after} came after the closing")
        self._bases[fragment] = last if event.carried else self._num_steps
        self._stepped_samples = event.carried
        self._steps = [step for step in self._steps if step.number > min(self._bases)]

    def _install(self, event: Install) -> None:
        self._buckets.clear()
        if event.carried:
            self._check_carried(event.carried)
        else:
            self._steps.clear()
            self._bases = [self._num_steps] * len(self._bases)
            self._stepped_samples = 0
        self._end_round()
        self.round, self._lineage, self._entered_round = event.round, event.lineage, event.round
        self._rounds.stood(self.stage, event.round, event.lineage, event.state, self.name)
        if event.source in ("initial", "checkpoint"):
            self._rounds.beginnings.add((self.stage, event.parent or event.lineage))
        if event.parent is not None:
            self._rounds.renamed[self.stage, event.lineage] = event.parent
            if self._synchronous:
                self._violation(f"began at round {event.round} with an older state: what counted since is lost")

    def _check_carried(self, num_samples: int) -> None:
        if num_samples != self._stepped_samples:
            self._violation(f"{num_samples} samples were carried over, and {self._stepped_samples} learnt from")

    def _check_standing(self, round_number: int, lineage: str | None, what: str) -> None:
        if self.round != round_number or lineage not in (None, self._lineage):
            self._findings.violation(
                f"{what} at another round or on another branch than it stood: round {self.round}",
                stage=self.stage, round=round_number, files=[self.name],
            )  # fmt: skip

    def _end_life(self) -> None:
        """What it holds now will be in no round, unless the round under way is still its own."""
        if self.stage >= 0 and not self._synchronous:
            for fragment, base in enumerate(self._bases):
                held = [bucket.ids for bucket in self._buckets.values()]
                held += [set(step.counts) for step in self._steps if step.number > base]
                self._rounds.held(self.stage, fragment, self.round, set().union(*held))

    def _violation(self, what: str, microbatches: Collection[int] = ()) -> None:
        self._findings.violation(
            what, microbatches=microbatches, stage=self.stage, round=self.round if self.stage >= 0 else None,
            files=[self.name],
        )  # fmt: skip


def _sum(counts: Iterable[Counter[int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for part in counts:
        total.update(part)
    return total
