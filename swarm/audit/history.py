"""Reads one process's event log, and follows its events in order: at which round the process stands, and what it
contributes and commits there.

A kill or a full disk can cut a line short. Such a line is skipped at the end of the file, or where a later process went
on writing. Any other line that is no event is an error that names the line's number. Only open things are remembered:
the process's holdings, and the attempts of the present round.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from swarm.audit.committed_rounds import CommittedRounds, Contribution
from swarm.audit.findings import Findings
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
    Move,
    Prepare,
    RollBack,
    Start,
    State,
    Step,
)
from swarm.machine import json_file
from swarm.training.run_rounds import next_lineage

_ADAPTERS: dict[str, TypeAdapter[Event]] = {name: TypeAdapter(event) for name, event in NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One event and its time.

    Attributes:
        monotonic: time in seconds; comparable among processes of one boot of one machine.
    """

    event: Event
    monotonic: float


def read(path: Path) -> Iterator[Line]:
    """Yield the events of a file. A file with nothing but one unfinished line gives none.

    Raises:
        ValueError: the file is no event log, or is broken; the message is one line.
        OSError: the file cannot be read.
    """
    broken: str | None = None
    started, text = False, b""
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
            if not started and not isinstance(line.event, Start):
                raise ValueError(f"{path}: no start before line {number}: this is not the whole log of a process")
            started = True
            if isinstance(line.event, Start) and line.event.format != FORMAT:
                raise ValueError(
                    f"{path} was written by swarm {line.event.software} in another format: audit it with that version"
                )
            yield line
        else:
            if not text.endswith(b"\n"):
                return  # The last line was cut short.
    if broken is not None:
        raise ValueError(broken)


def _parse(text: bytes) -> Line:
    try:
        values: dict[str, Any] = json_file.parse(text)
        name, monotonic = values.pop("event"), values.pop("monotonic")
        values.pop("time")
        event = _ADAPTERS[name].validate_python(values)
    except ValidationError as error:
        raise ValueError(f"{error.errors()[0]['msg']}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(type(error).__name__ if not isinstance(error, ValueError) else "not JSON") from None
    return Line(event=event, monotonic=float(monotonic))


class History:
    def __init__(self, name: str, findings: Findings, rounds: CommittedRounds) -> None:
        self.name = name
        self.start: Start | None = None
        self._findings = findings
        self._rounds = rounds
        self._begin_life(-1)

    def _begin_life(self, stage: int) -> None:
        """Begin with nothing, like a process that has just begun, or moved."""
        self.stage = stage
        self.round = 0
        """The round at which the process stands."""
        self._entered_round = 0
        """The round at which the process began, or installed another state."""
        self._lineage: str | None = None
        num_fragments = self.start.num_fragments if self.start is not None else 1
        self._holdings = Holdings(
            is_synchronous=self._is_synchronous, num_fragments=num_fragments, report=self._violation
        )
        self._begin_round()

    def _begin_round(self) -> None:
        self._closing: Closing | None = None
        """The newest closing of the present round."""
        self._prepared: tuple[str, Closing] | None = None
        """The digest of the result that the process prepared last in the present round, and the closing that is in it.
        A newer closing may follow before that result is committed."""
        self._begun: tuple[int, str] | None = None
        self._attempts: set[int] = set()
        """The attempts that it has begun in the present round."""

    @property
    def _is_synchronous(self) -> bool:
        return self.start is not None and self.start.setting == "synchronous"

    def feed(self, line: Line) -> None:
        """Take the next event of the file."""
        self._findings.events += 1
        event: Event = line.event
        match event:
            case Start():
                self.finish()
                self.start = event
                self._begin_life(event.stage)
            case Move():
                self.finish()
                self._begin_life(event.stage)
            case Gap():
                self._violation(f"{event.lost} events were not written, so nothing after them is proven")
            case Hop() if self.stage < 0:
                self.round = event.round
            case Accumulate():
                self._accumulate(event)
            case RollBack():
                self._findings.rolled_back += 1
                self._holdings.roll_back(event)
            case Ack():
                self._rounds.acknowledged(event.microbatch, by_trainer=self.stage < 0)
                if self.stage >= 0:
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
        """Note that the process ends: its file ends here, or goes on with a process that was started anew or moved.

        What the process holds now will be in no round, unless the round under way still takes it.
        """
        if self.stage >= 0 and not self._is_synchronous:
            for fragment, microbatches in enumerate(self._holdings.untaken()):
                self._rounds.held(self.stage, fragment, self.round, microbatches)

    def _accumulate(self, event: Accumulate) -> None:
        assert self.start is not None
        if self._is_synchronous and event.microbatch // self.start.round_microbatches != self.round:
            self._violation("accumulated in another round than its own", [event.microbatch])
        if event.only_at not in (None, self.stage):
            self._violation(f"accumulated, though only stage {event.only_at} lacks it", [event.microbatch])
        self._holdings.accumulate(event)

    def _promise(self, event: Begin, line: Line) -> None:
        self._check_standing(event.round, event.lineage, "took part in an attempt")
        self._begun = event.attempt, event.leader
        self._attempts.add(event.attempt)
        self._rounds.begun(self.stage, event.lineage, self._begun)
        if self._closing is not None and self._closing.round == event.round:
            self._rounds.offered(self._contribution(event, self._closing, line))

    def _prepare(self, event: Prepare, line: Line) -> None:
        self._check_standing(event.round, event.lineage, "prepared a result")
        closing = self._closing
        if closing is None or closing.round != event.round or self._begun != (event.attempt, event.leader):
            self._violation("prepared the result of an attempt that it had not begun")
            return
        self._prepared = event.digest, closing
        self._rounds.prepared(self._contribution(event, closing, line), event.digest, event.members)

    def _contribution(self, event: Begin | Prepare, closing: Closing, line: Line) -> Contribution:
        assert self.start is not None
        return Contribution(
            stage=self.stage,
            round=event.round,
            parent=event.lineage,
            peer=self.start.peer,
            ballot=(event.attempt, event.leader),
            closing=closing,
            most_samples=self.start.most_samples,
            file=self.name,
            boot=self.start.boot,
            monotonic=line.monotonic,
        )

    def _commit(self, event: Commit, line: Line) -> None:
        assert self.start is not None
        self._check_standing(event.round, event.parent, "committed")
        norm, partners = event.total_squared_norm, event.partners
        lineage = next_lineage(
            event.parent, event.round, event.digest, event.members, total_squared_norm=norm, partners=partners
        )
        if event.lineage != lineage:
            self._violation(f"lineage {event.lineage[:12]} does not follow from what was committed")
        is_member = self.start.peer in event.members
        # A process that was just started, or has just installed a state, may commit an attempt that began before that.
        # Otherwise it must have begun the attempt. It need not have prepared the result: a member whose exchange failed
        # takes the result from the others.
        took_part = event.attempt in self._attempts or event.round == self._entered_round
        if is_member and not took_part:
            self._violation("committed a result as a member, but had not begun its attempt")
        digest, closing = self._prepared or ("", None)
        self._holdings.commit(event, closing if digest == event.digest else self._closing, is_member=is_member)
        at = (self.start.boot, line.monotonic) if self._is_synchronous and self.start.boot else None
        self._rounds.committed(self.stage, event, file=self.name, at=at)
        self.round, self._lineage = event.round + 1, event.lineage
        self._begin_round()

    def _install(self, event: Install) -> None:
        self._holdings.install(event.carried)
        self._begin_round()
        self.round, self._lineage, self._entered_round = event.round, event.lineage, event.round
        self._rounds.stood(self.stage, event.round, event.lineage, event.state, self.name)
        is_beginning = event.source in ("initial", "checkpoint")
        self._rounds.entered(self.stage, event.lineage, renamed_from=event.parent, is_beginning=is_beginning)
        if event.parent is not None and self._is_synchronous:
            self._violation(f"began at round {event.round} with an older state: what counted since is lost")

    def _check_standing(self, round_number: int, lineage: str | None, what: str) -> None:
        if self.round != round_number or lineage not in (None, self._lineage):
            what = f"{what} at another round or on another branch than it stood: round {self.round}"
            self._findings.violation(what, stage=self.stage, round=round_number, files=[self.name])

    def _violation(self, what: str, microbatches: Collection[int] = ()) -> None:
        round_number = self.round if self.stage >= 0 else None
        self._findings.violation(
            what, microbatches=microbatches, stage=self.stage, round=round_number, files=[self.name]
        )
