"""Reads one process's event log, and follows its events in order: at which round each block that the process serves
stands, and what it contributes and commits there.

A kill or a full disk can cut a line short. Such a line is skipped at the end of the file, or where a later process went
on writing. Any other line that is no event is an error that names the line's number. Only open things are remembered:
what each block holds, and the attempts of its present round.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from swarm.audit.committed_rounds import TRAINER_BLOCK, CommittedRounds, Contribution
from swarm.audit.holdings import Closing, Holdings
from swarm.events import (
    FORMAT,
    NAMES,
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
    Leave,
    OutOfLine,
    Prepare,
    RollBack,
    Start,
    State,
    Step,
)
from swarm.machine import json_file
from swarm.training.run_rounds import next_lineage
from swarm.types import LARGEST_STAGE, TRAINER_STAGE, Block

_ADAPTERS: dict[str, TypeAdapter[Event]] = {name: TypeAdapter(event) for name, event in NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One event and its time.

    Attributes:
        monotonic: time in seconds; comparable among processes of one boot of one machine.
        block: the block that the event is about; None where the line names none.
    """

    event: Event
    monotonic: float
    block: Block | None


def read(path: Path) -> Iterator[Line]:
    """Yield the events of a file. A file with nothing but one unfinished line gives none. Raises ValueError, of one
    line, if the file is no event log, or is broken, and OSError if it cannot be read."""
    broken: str | None = None
    start, text = None, b""
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = _parse(text)
            except ValueError as error:
                if broken is not None:
                    break
                broken = f"{path}: line {number} is no event ({error})"
                continue
            if broken is not None and not isinstance(line.event, Start | Gap):
                break
            broken = None
            start = line.event if isinstance(line.event, Start) else start
            if start is None:
                raise ValueError(f"{path}: no start before line {number}: this is not the whole log of a process")
            if start.format != FORMAT:
                raise ValueError(f"{path} is in another format, of swarm {start.software}: audit it with that version")
            if not _fits(line, start):
                raise ValueError(f"{path}: line {number} is about a stage or a fragment that the run does not have")
            yield line
        else:
            if not text.endswith(b"\n"):
                return  # The last line was cut short.
    if broken is not None:
        raise ValueError(broken)


def _parse(text: bytes) -> Line:
    try:
        values: dict[str, Any] = json_file.parse(text)
        name, monotonic = values.pop("event"), float(values.pop("monotonic"))
        values.pop("time")
        block = Block.parse(values.pop("block")) if "block" in values else None
        event = _ADAPTERS[name].validate_python(values)
    except ValidationError as error:
        raise ValueError(f"{error.errors()[0]['msg']}") from None
    except KeyError as error:
        raise ValueError(f"no key or kind {error}; what a newer release wrote is audited with that one") from None
    except (ValueError, OverflowError, TypeError, AttributeError) as error:
        raise ValueError(type(error).__name__ if not isinstance(error, ValueError) else "not JSON") from None
    return Line(event=event, monotonic=monotonic, block=block)


def _fits(line: Line, start: Start) -> bool:
    """Whether a line is about a stage and a fragment that there can be."""
    stage = start.stage if line.block is None else line.block.stage
    fragment = line.event.fragment if isinstance(line.event, Close) else 0
    return (
        TRAINER_STAGE <= stage < start.num_stages <= LARGEST_STAGE + 1
        and 0 <= fragment < start.num_fragments <= LARGEST_STAGE
        and (line.event is not start or all(len(path) == start.num_stages for path in start.paths))
    )


class History:
    """One file: a life for each block that its process serves, and one for a trainer."""

    def __init__(self, name: str, rounds: CommittedRounds) -> None:
        self.start: Start | None = None
        self._name = name
        self._rounds = rounds
        self._lives: dict[Block, _Life] = {}

    @property
    def round(self) -> int:
        """The round of the block that has come least far."""
        return min((life.round for life in self._serving()), default=0)

    def block_of(self, line: Line) -> Block:
        """The block that a line is about. A trainer's lines name none, nor do those about the whole process."""
        assert self.start is not None
        return line.block or Block(self.start.stage)

    def feed(self, line: Line) -> None:
        self._rounds.findings.events += 1
        match line.event:
            case Start() as start:
                self.finish()
                self.start, self._lives = start, {}
            case Leave() if (life := self._lives.get(self.block_of(line))) is not None:
                life.finish()
            case Leave():
                pass
            case Install() if (life := self._lives.get(self.block_of(line))) is not None and life.has_left:
                del self._lives[self.block_of(line)]
                self._life(self.block_of(line)).feed(line)
            case Gap():
                for life in self._serving() or [self._life(self.block_of(line))]:
                    life.feed(line)
            case _:
                self._life(self.block_of(line)).feed(line)

    def finish(self) -> None:
        """Note that the process ends: its file ends here, or goes on with a process that was started anew."""
        for life in self._serving():
            life.finish()

    def _serving(self) -> list["_Life"]:
        return [life for life in self._lives.values() if not life.has_left]

    def _life(self, block: Block) -> "_Life":
        if block not in self._lives:
            assert self.start is not None
            self._lives[block] = _Life(self._name, block, self.start, self._rounds)
        return self._lives[block]


_IN_ANOTHER_ROUND = "accumulated in another round than its own"


class _Life:
    """One block from the time when a process begins to serve it until it begins to serve it again. After it has left
    the block, the round under way may still be committed, what no round takes is undone, and the digest of its last
    state becomes known."""

    def __init__(self, name: str, block: Block, start: Start, rounds: CommittedRounds) -> None:
        self.round = 0
        """The round at which the block stands."""
        self.has_left = False
        self._name = name
        self._block = block
        self._start = start
        self._rounds = rounds
        self._is_synchronous = start.setting == "synchronous"
        self._entered_round = 0
        """The round at which the life began, or another state was installed."""
        self._lineage: str | None = None
        self._holdings = Holdings(
            is_synchronous=self._is_synchronous, num_fragments=start.num_fragments, report=self._violation
        )
        self._begin_round()

    def _begin_round(self, first_microbatch: int | None = None) -> None:
        usual = self.round * self._start.round_microbatches
        self._first_microbatch = usual if first_microbatch is None else first_microbatch
        """Synchronous: the first microbatch of the present round."""
        self._closing: Closing | None = None
        """The newest closing of the present round."""
        self._prepared: tuple[str, Closing] | None = None
        """The digest of the result that the process prepared last in the present round, and the closing that is in it.
        A newer closing may follow before that result is committed."""
        self._begun: tuple[int, str] | None = None
        self._most_samples = 0
        """How many of its samples can count in the attempt that it has begun."""
        self._beyond: list[int] = []
        """Synchronous: what it has accumulated of later rounds, if this round has the size with which the run began."""
        self._attempts: dict[int, Closing | None] = {}
        """The attempts that it has begun in the present round, and the closing with which it did."""

    def feed(self, line: Line) -> None:
        event: Event = line.event
        is_trainer = self._block == TRAINER_BLOCK
        match event:
            case Gap():
                self._violation(f"{event.lost} events were not written, so nothing after them is proven")
            case Hop() if is_trainer:
                self.round = event.round
            case Accumulate():
                self._accumulate(event)
            case RollBack():
                self._rounds.findings.rolled_back += 1
                self._holdings.roll_back(event)
            case Ack():
                self._rounds.acknowledged(event.microbatch, by_trainer=is_trainer)
                if not is_trainer:
                    self._holdings.acknowledge(event.microbatch)
            case Step():
                self._holdings.step(event)
            case Close():
                self._check_standing(event.round, None, "closed")
                self._closing = self._holdings.close(event)
            case Begin():
                self._promise(event, line)
            case Prepare():
                self._prepare(event, line)
            case Abort():
                self._rounds.given_up(self._block, self._lineage or "", (event.attempt, event.leader))
            case Commit():
                self._commit(event, line)
            case OutOfLine() if event.is_named:
                reason = f"stage {self._block}, round {event.round}: {event.reason}"
                self._rounds.findings.liars.setdefault(event.peer, {})[self._name] = reason
            case State():
                self._rounds.stood(self._block, event.round, event.lineage, event.digest, self._name)
            case Install():
                self._install(event)
            case _:
                pass

    def finish(self) -> None:
        """Note that the process serves the block no longer.

        What the block holds now will be in no round, unless the round under way still takes it.
        """
        self.has_left = True
        if self._block != TRAINER_BLOCK and not self._is_synchronous:
            for fragment, microbatches in enumerate(self._holdings.untaken()):
                self._rounds.held(self._block, fragment, self.round, microbatches)

    def _accumulate(self, event: Accumulate) -> None:
        if self._is_synchronous and event.microbatch < self._first_microbatch:
            self._violation(_IN_ANOTHER_ROUND, [event.microbatch])
        if event.microbatch >= self._first_microbatch + self._start.round_microbatches:
            self._beyond.append(event.microbatch)
        if not self._start.passes(event.microbatch, self._block):
            self._violation("accumulated, though its path leads elsewhere", [event.microbatch])
        if event.only_at not in (None, self._block.stage):
            self._violation(f"accumulated, though only stage {event.only_at} lacks it", [event.microbatch])
        self._holdings.accumulate(event)

    def _promise(self, event: Begin, line: Line) -> None:
        self._check_standing(event.round, event.lineage, "took part in an attempt")
        self._begun = event.attempt, event.leader
        self._most_samples = event.most_samples or self._start.most_samples_of(self._block)
        self._attempts[event.attempt] = self._closing
        self._rounds.begun(self._block, event.lineage, self._begun)
        if self._closing is not None and self._closing.round == event.round:
            self._rounds.offered(self._contribution(event, self._closing, line))

    def _prepare(self, event: Prepare, line: Line) -> None:
        self._check_standing(event.round, event.lineage, "prepared a result")
        closing = self._closing
        if closing is None or closing.round != event.round or self._begun != (event.attempt, event.leader):
            self._violation("prepared the result of an attempt that it had not begun")
            return
        self._prepared = event.digest, closing
        self._rounds.prepared(self._contribution(event, closing, line), event.digest)

    def _contribution(self, event: Begin | Prepare, closing: Closing, line: Line) -> Contribution:
        return Contribution(
            block=self._block, round=event.round, parent=event.lineage, peer=self._start.peer,
            ballot=(event.attempt, event.leader), closing=closing, most_samples=self._most_samples, file=self._name,
            boot=self._start.boot, monotonic=line.monotonic,
            members=event.members if isinstance(event, Prepare) else (),
        )  # fmt: skip

    def _commit(self, event: Commit, line: Line) -> None:
        self._check_standing(event.round, event.parent, "committed")
        norm, partners = event.total_squared_norm, event.partners
        lineage = next_lineage(
            event.parent, event.round, event.digest, event.members, total_squared_norm=norm, partners=partners,
            amended=event.amended,
        )  # fmt: skip
        if event.lineage != lineage:
            self._violation(f"lineage {event.lineage[:12]} does not follow from what was committed")
        is_member = self._start.peer in event.members
        # A process that was just started, or has just installed a state, may commit an attempt that began before that.
        # Otherwise it must have begun the attempt. It need not have prepared the result: a member whose exchange failed
        # takes the result from the others.
        took_part = event.attempt in self._attempts or event.round == self._entered_round
        if is_member and not took_part:
            self._violation("committed a result as a member, but had not begun its attempt")
        digest, closing = self._prepared or ("", None)
        if digest != event.digest:
            # Its group may have averaged what it closed for that attempt, though it never got the result.
            closing = self._attempts.get(event.attempt) or self._closing
        self._holdings.commit(event, closing, is_member=is_member)
        at = (self._start.boot, line.monotonic) if self._is_synchronous and self._start.boot else None
        self._rounds.committed(self._block, event, file=self._name, at=at)
        if self._is_synchronous and self._beyond and not event.amended:
            self._violation(_IN_ANOTHER_ROUND, self._beyond)
        self.round, self._lineage = event.round + 1, event.lineage
        self._begin_round(event.next_microbatch)

    def _install(self, event: Install) -> None:
        self._holdings.install(event.carried)
        self.round, self._lineage, self._entered_round = event.round, event.lineage, event.round
        self._begin_round(event.first_microbatch)
        self._rounds.began(self._block, event.lineage, event.first_microbatch)
        self._rounds.stood(self._block, event.round, event.lineage, event.state, self._name)
        is_beginning = event.source in ("initial", "checkpoint")
        self._rounds.entered(self._block, event.lineage, renamed_from=event.parent, is_beginning=is_beginning)
        if event.parent is not None and self._is_synchronous:
            self._violation(f"began at round {event.round} with an older state: what counted since is lost")

    def _check_standing(self, round_number: int, lineage: str | None, what: str) -> None:
        if self.round != round_number or lineage not in (None, self._lineage):
            what = f"{what} at another round or on another branch than it stood: round {self.round}"
            self._rounds.findings.violation(what, block=self._block, round=round_number, files=[self._name])

    def _violation(self, what: str, microbatches: Collection[int] = ()) -> None:
        round_number = None if self._block == TRAINER_BLOCK else self.round
        self._rounds.findings.violation(
            what, microbatches=microbatches, block=self._block, round=round_number, files=[self._name]
        )
