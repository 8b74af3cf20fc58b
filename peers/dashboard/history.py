"""What a dashboard remembers of a run, which is bounded, and the file that keeps it between two starts.

Used by watcher.py, which adds every view of the run, and by program.py, which opens the file.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from peers.dashboard.contributions import Contributions
from peers.dashboard.news import Kind, Line, news
from peers.dashboard.rounds import Rounds
from peers.dashboard.series import Series
from peers.status.view import SwarmView
from swarm.machine.disk import put_in_place
from swarm.machine.words import counted

logger = logging.getLogger(__name__)

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
        """Add a view.

        Args:
            before: the view before it; None for the first that this process took.
            at: when the view was taken, in seconds since the epoch.

        Returns:
            The figures that are followed over time.
        """
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
        """Note an event."""
        self.events.append(Event(at=at, kind=line.kind, text=line.text))
        del self.events[:-MOST_EVENTS]


def figures_over_time(view: SwarmView) -> dict[str, float | None]:
    """The whole run in a few numbers: figures of the trainer that is furthest on, and of all peers together."""
    farthest = max(view.trainers, key=lambda row: (row.step, row.name), default=None)
    rates = [sum(peer.samples_per_second for peer in row.peers) for row in view.stages]
    return {
        "loss": None if farthest is None or not farthest.step else farthest.loss,
        "tokens_per_second": None if farthest is None or not farthest.step else farthest.tokens_per_second,
        "step": None if farthest is None else farthest.step,
        "peers": sum(peer.state == "serving" for peer in view.peers),
        "samples_per_second": min(rates, default=0.0),
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
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_bytes(self._type.dump_json(history))
            put_in_place(temporary, self._path)
        except OSError as error:
            if not self._is_failing:
                logger.error("the history is not written to %s: %s", self._path, error.strerror or error)
            self._is_failing = True
        else:
            self._is_failing = False
