"""Draws a SwarmView: a table that stays in place on a terminal, a line a step anywhere else.

Used by swarm-local and by swarm-status. Never asks anybody anything.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from peers.status.figure import Column, needed_columns
from peers.status.peer_row import PeerRow
from peers.status.view import SwarmView, TrainerRow

_EVENTS_SHOWN = 5


class LiveTable:
    """Shows one view after another while its `with` block runs."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._printed: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, *views: SwarmView) -> None:
        """Replace what is shown of all runs; without a terminal, print the lines that are new."""
        if self._live:
            self._live.update(Group(*map(render, views)), refresh=True)
            return
        lines = {f"{view.run} {key}": line for view in views for key, line in plain_lines(view).items()}
        for key, line in lines.items():
            if key not in self._printed:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._printed = lines


def render(view: SwarmView) -> RenderableType:
    """The view as a rich renderable."""
    parts: list[RenderableType] = [_peers(view)]
    if view.trainers:
        parts.append(_trainers(view.trainers))
    parts += [Text(line, style="bold red") for line in (*_warnings(view), *view.refusals.values())]
    parts += [Text(line, style="yellow") for line in (*view.bans.values(), *view.waits)]
    parts += [Text(event, style="dim") for event in view.events[-_EVENTS_SHOWN:]]
    return Group(*parts)


def plain_lines(view: SwarmView) -> dict[str, str]:
    """Events, warnings, and each trainer's step, under keys by which a line is known to be old news."""
    lines = {line: line for line in (*view.events, *_warnings(view))} | view.refusals | view.bans
    for trainer in view.trainers:
        if trainer.step:
            name = f" ({trainer.name})" if len(view.trainers) > 1 else ""
            progress = f"loss {trainer.loss_text}, {trainer.tokens_per_second:,.0f} tokens/s"
            lines[f"{trainer.name} step {trainer.step}"] = f"step {trainer.step}: {progress}{name}"
    return lines


def _peers(view: SwarmView) -> Table:
    rows = [(row.stage, peer) for row in view.stages for peer in row.peers]
    columns = needed_columns(PeerRow, [peer for _, peer in rows])
    # Without lines between the columns: all of them are to fit.
    table = Table(title=f"run {escape(view.run)}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("stage", justify="right")
    _add(table, columns)
    for row in view.stages:
        for peer in row.peers:
            table.add_row(str(row.stage), *_cells(peer, columns))
        if row.stage in view.empty_stages:
            table.add_row(str(row.stage), Text("no peer", style="bold red"))
    return table


def _trainers(rows: Sequence[TrainerRow]) -> Table:
    table, columns = Table(), needed_columns(TrainerRow, rows)
    _add(table, columns)
    for row in rows:
        table.add_row(*_cells(row, columns))
    return table


def _add(table: Table, columns: Mapping[str, Column]) -> None:
    for column in columns.values():
        table.add_column(column.heading, justify="left" if column.is_text else "right")


def _cells(row: object, columns: Mapping[str, Column]) -> list[Text]:
    # As text and not as markup: names come from strangers.
    return [Text(column.text(row), style=column.styles.get(getattr(row, name), "")) for name, column in columns.items()]


def _warnings(view: SwarmView) -> list[str]:
    return [
        *(f"stage {stage} has no peer: start one with swarm-peer --stage {stage}" for stage in view.empty_stages),
        *(
            f"no peer of stage {stage} answers ({', '.join(names)}): just died, frozen, or out of reach from here"
            for stage, names in view.silent_stages.items()
        ),
    ]
