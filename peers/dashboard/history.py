"""What a dashboard remembers of a run, which is bounded, and the file that keeps it between two starts.

It has figures over time, as means over spans of equal length, at three lengths. Their number is bounded, however long a
run lasts.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from peers.dashboard.rounds import Contributions, Rounds, by_peer
from peers.status.peer_row import PeerRow
from peers.status.view import SwarmView
from swarm.machine.disk import replacing
from swarm.machine.words import counted
from swarm.types import Block

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 24
"""The most lines about one view. If there are more, a line gives only their number."""

Kind = Literal["good", "bad", "plain"]


class Line(NamedTuple):
    kind: Kind
    text: str


def news(before: SwarmView | None, now: SwarmView) -> list[Line]:
    if before is None:
        num_peers = sum(peer.stays for peer in now.peers)
        return [Line("plain", f"this page begins to watch: peers {num_peers}, trainers {len(now.trainers)}")]
    lines = [*_of_stages(before, now), *_of_peers(before, now), *_of_trainers(before, now), *_of_refusals(before, now)]
    if (more := len(lines) - MOST_AT_ONCE) > 0:
        lines[MOST_AT_ONCE:] = [Line("plain", f"and {more} more changes")]
    return lines


def _of_stages(before: SwarmView, now: SwarmView) -> Iterator[Line]:
    was_empty, is_empty = before.empty_stages, now.empty_stages
    for stage in [stage for stage in is_empty if stage not in was_empty]:
        last = now.last_peers.get(stage)
        yield Line("bad", f"stage {stage} has no peer{f': {last.name} was its last one' if last else ''}")
    silent = [stage for stage in now.silent_stages if stage not in before.silent_stages]
    yield from (Line("bad", f"no peer of stage {stage} answers") for stage in silent)
    yield from (Line("good", f"stage {stage} has a peer again") for stage in was_empty if stage not in is_empty)


def _of_peers(before: SwarmView, now: SwarmView) -> Iterator[Line]:
    earlier, present = _by_id(before), _by_id(now)
    for peer_id, (blocks, peer) in present.items():
        if peer_id not in earlier:
            yield from _of_newcomer(_written(blocks), peer)
        else:
            yield from _of_change(*earlier[peer_id], blocks, peer)
    for peer_id, (blocks, peer) in earlier.items():
        if peer_id not in present and peer.state != "leaving":
            yield Line("bad", f"{peer.name} of stage {_written(blocks)} has gone")


def _written(blocks: Sequence[Block]) -> str:
    """Adjacent blocks as people write them: 2, or 1-3."""
    return f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else str(blocks[0])


def _of_newcomer(stage: str, peer: PeerRow) -> Iterator[Line]:
    if peer.state == "serving":
        yield Line("good", f"{peer.name} serves stage {stage}")
    elif peer.state in ("joining", "moving"):
        yield Line("plain", f"{peer.name} is on its way to stage {stage}")


def _of_change(was: Sequence[Block], old: PeerRow, now: Sequence[Block], peer: PeerRow) -> Iterator[Line]:
    stage = _written(now)
    if peer.state == "serving" and was != now:
        does = "serves" if set(was) & set(now) else f"has moved from stage {_written(was)} to"
        yield Line("good", f"{peer.name} {does} stage {stage}")
    elif peer.started_at > old.started_at > 0:
        yield Line("plain", f"{peer.name} of stage {stage} was started again")
    elif peer.state == old.state:
        return
    elif peer.state == "unreachable":
        if old.state != "leaving":
            yield Line("bad", f"{peer.name} of stage {stage} does not answer")
    elif peer.state == "serving":
        how = "answers again" if old.state == "unreachable" else f"serves stage {stage}"
        yield Line("good", f"{peer.name} {how}")
    elif peer.state == "leaving":
        yield Line("plain", f"{peer.name} leaves stage {stage}")
    elif peer.moving_to is not None:
        yield Line("plain", f"{peer.name} leaves stage {stage} for stage {peer.moving_to}")


def _of_trainers(before: SwarmView, now: SwarmView) -> Iterator[Line]:
    earlier, present = {row.name for row in before.trainers}, {row.name for row in now.trainers}
    yield from (Line("good", f"trainer {name} is there") for name in sorted(present - earlier))
    yield from (Line("plain", f"trainer {name} has gone") for name in sorted(earlier - present))


def _of_refusals(before: SwarmView, now: SwarmView) -> Iterator[Line]:
    for key in now.refusals.keys() - before.refusals.keys():
        yield Line("bad", now.refusals[key])


def _by_id(view: SwarmView) -> dict[str, tuple[Sequence[Block], PeerRow]]:
    """The blocks of each peer by its id, and its row at the last of them. A moving peer has rows at its old and at its
    new blocks: the new ones are taken."""
    found: dict[str, tuple[Sequence[Block], PeerRow]] = {}
    for peer_id, rows in by_peer(view).items():
        blocks = [block for block, peer in rows.items() if peer.stays] or list(rows)
        found[peer_id] = (blocks, rows[blocks[-1]])
    return found


@dataclass
class Series:
    """The newest spans of a fixed length. If it `coarsens`, it keeps all spans instead, and doubles their length
    whenever there are too many.

    Attributes:
        span_seconds: length of a span.
        at: when each span began, in seconds since the epoch.
        columns: for each figure, its mean in each span; None if it was not known.
        counts: how many values of each figure are in the last span's mean.
    """

    span_seconds: float
    max_spans: int
    coarsens: bool = False
    at: list[float] = field(default_factory=list)
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.span_seconds <= 0 or self.max_spans < 2 or any(len(c) != len(self.at) for c in self.columns.values()):
            raise ValueError(
                "a series needs a span length above 0, room for two spans, and as many values of a figure as spans"
            )

    def add(self, at: float, values: Mapping[str, float | None]) -> None:
        """Add the values of a moment. They count for the last span even if the clock was set back to a time before
        it."""
        began = at - at % self.span_seconds
        if not self.at or began > self.at[-1]:
            self.at.append(began)
            self.counts = {}
            for column in self.columns.values():
                column.append(None)
        for name, value in values.items():
            column = self.columns.setdefault(name, [None] * len(self.at))
            if value is not None:
                count = self.counts[name] = self.counts.get(name, 0) + 1
                before = column[-1]
                column[-1] = value if before is None else before + (value - before) / count
        while len(self.at) > self.max_spans:
            self._make_room()

    def _make_room(self) -> None:
        if not self.coarsens:
            del self.at[0]
            for column in self.columns.values():
                del column[0]
            return
        self.span_seconds *= 2
        groups: dict[float, list[int]] = {}
        for index, began in enumerate(self.at):
            groups.setdefault(began - began % self.span_seconds, []).append(index)
        self.at = list(groups)
        self.columns = {
            name: [_mean([column[index] for index in group]) for group in groups.values()]
            for name, column in self.columns.items()
        }

    def to_json(self) -> dict[str, object]:
        return {"span_seconds": self.span_seconds, "at": self.at, "columns": self.columns}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


MOST_EVENTS = 200
LONGEST_GAP_SECONDS = 60.0
"""If two views are further apart than this, the time between them does not count as serving time."""


@dataclass
class Event:
    """Something that happened, and when it was seen (`at`), in seconds since the epoch."""

    at: float
    kind: Kind
    text: str


def _all_series() -> dict[str, Series]:
    return {
        "hour": Series(span_seconds=5.0, max_spans=720),
        "day": Series(span_seconds=60.0, max_spans=1440),
        "all": Series(span_seconds=600.0, max_spans=1440, coarsens=True),
    }


@dataclass
class History:
    """What is remembered of one run.

    Attributes:
        series: figures over time, by the span that they cover: `hour`, `day` or `all`.
        last_look: when the last view was taken, in seconds since the epoch.
    """

    run: str
    series: dict[str, Series] = field(default_factory=_all_series)
    rounds: Rounds = field(default_factory=Rounds)
    contributions: Contributions = field(default_factory=Contributions)
    events: list[Event] = field(default_factory=list)
    last_look: float = 0.0

    def add(self, before: SwarmView | None, view: SwarmView, at: float) -> dict[str, float | None]:
        """Add a view, and return its figures that are followed over time. `before` is the view before it; None for the
        first that this process took. `at` is in seconds since the epoch."""
        passed = at - self.last_look
        figures = figures_over_time(view)
        for series in self.series.values():
            series.add(at, figures)
        self.rounds.add(view, at)
        self.contributions.add(view, at, seconds=passed if 0 <= passed <= LONGEST_GAP_SECONDS else 0.0)
        for line in news(before, view):
            self.happened(line, at)
        self.last_look = at
        return figures

    def happened(self, line: Line, at: float) -> None:
        self.events.append(Event(at=at, kind=line.kind, text=line.text))
        del self.events[:-MOST_EVENTS]


def figures_over_time(view: SwarmView) -> dict[str, float | None]:
    """The whole run in a few numbers: figures of the trainer that is furthest on, and of all peers together."""
    farthest = max(view.trainers, key=lambda row: (row.step, row.name), default=None)
    rates = defaultdict[int, float](float)
    for row in view.stages:
        rates[row.stage] += sum(peer.samples_per_second for peer in row.peers)
    return {
        "loss": None if farthest is None or not farthest.step else farthest.loss,
        "tokens_per_second": None if farthest is None or not farthest.step else farthest.tokens_per_second,
        "step": None if farthest is None else farthest.step,
        "peers": sum(peer.state == "serving" for peer in view.peers),
        "samples_per_second": min(rates.values(), default=0.0),
    }


class HistoryFile:
    """The file that keeps a run's history between two starts of a dashboard."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._type: TypeAdapter[History] = TypeAdapter(History)
        self._is_failing = False

    def read(self, run: str) -> History:
        """The history that was written last, or an empty one. A file that is no history is renamed. Raises OSError."""
        try:
            found = self._type.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return History(run=run)
        except ValidationError as error:
            aside = self._path.with_suffix(".unreadable")
            self._path.replace(aside)
            logger.warning(
                "%s is no history (%s): it is renamed to %s, and a new history begins",
                self._path,
                counted(error.error_count(), "fault"),
                aside,
            )
            return History(run=run)
        return found if found.run == run else History(run=run)

    def write(self, history: History) -> None:
        """Replace the file. If that fails (the disk is full, say), the former file stays, and the log says so once."""
        try:
            with replacing(self._path) as temporary:
                temporary.write_bytes(self._type.dump_json(history))
        except OSError as error:
            if not self._is_failing:
                logger.error("the history is not written to %s: %s", self._path, error.strerror or error)
            self._is_failing = True
        else:
            self._is_failing = False
