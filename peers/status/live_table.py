"""Draws a SwarmView: on a terminal a table that stays in place, elsewhere a line for each step.

A table has as many of its columns as the terminal has room for. Each column has a rank, and those of the highest ranks
are left out first; a line says which.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from peers.status.figure import Column, needed_columns
from peers.status.peer_row import PeerRow
from peers.status.view import SwarmView, TrainerRow, remedy

ANY_WIDTH = 1 << 16
"""More characters than any table is wide."""
_EVENTS_SHOWN = 5


class Screen(Console):
    """rich's console, but it raises BrokenPipeError when nothing reads its output, as in `swarm-status | head`."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, for which run_program ends the program. rich would raise SystemExit, which ends only
        one asyncio task."""
        raise BrokenPipeError


@dataclass(frozen=True)
class Strip:
    column: Column
    cells: Sequence[Text]


class FittingTable:
    """A rich renderable, which chooses its columns each time it is drawn."""

    def __init__(self, strips: Sequence[Strip], frame: Callable[[], Table]) -> None:
        """`strips` are the columns, from left to right. `frame` makes a table without columns, which has the title and
        the lines between cells."""
        self._strips = strips
        self._frame = frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width if console.is_terminal else ANY_WIDTH
        shown = list(self._strips)
        while len(shown) > 1 and self._least_width(shown, console, options) > width:
            shown.remove(max(shown, key=lambda strip: strip.column.rank))
        yield from console.render(self._table(shown), options.update(width=width))
        if missing := [strip.column.heading for strip in self._strips if strip not in shown]:
            yield Text(
                f"no room for {', '.join(missing)}: a wider terminal shows more, and swarm-status --json all",
                style="dim",
            )

    def _least_width(self, strips: Sequence[Strip], console: Console, options: ConsoleOptions) -> int:
        table = self._table(strips, is_cut=True)
        return Measurement.get(console, options.update(width=ANY_WIDTH), table).maximum

    def _table(self, strips: Sequence[Strip], *, is_cut: bool = False) -> Table:
        table = self._frame()
        for column in (strip.column for strip in strips):
            table.add_column(
                column.heading, justify="left" if column.is_text else "right", no_wrap=column.least_width is None,
                max_width=column.least_width if is_cut else None,
            )  # fmt: skip
        for cells in zip(*(strip.cells for strip in strips), strict=True):
            table.add_row(*cells)
        return table


class LiveTable:
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Screen()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._printed: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, *views: SwarmView) -> None:
        """Replace the tables of all runs; without a terminal, print the lines that are new."""
        if self._live:
            self._live.update(Group(*map(render, views)), refresh=True)
            return
        lines = {f"{view.run} {key}": line for view in views for key, line in plain_lines(view).items()}
        for key, line in lines.items():
            if key not in self._printed:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._printed = lines


def render(view: SwarmView) -> RenderableType:
    parts: list[RenderableType] = [_peers(view)]
    if view.trainers:
        parts.append(FittingTable(_strips(TrainerRow, view.trainers), Table))
    parts += [Text(line, style="dim") for line in view.left_out]
    parts += [Text(line, style="bold red") for line in (*_warnings(view), *view.refusals.values())]
    parts += [Text(line, style="yellow") for line in (*view.bans.values(), *view.older, *view.waits)]
    parts += [Text(event, style="dim") for event in view.events[-_EVENTS_SHOWN:]]
    return Group(*parts)


def plain_lines(view: SwarmView) -> dict[str, str]:
    """Lines for events, warnings and each trainer's step, by keys. A line is new if no line with its key was printed
    before."""
    lines = {line: line for line in (*view.events, *view.older, *_warnings(view))} | view.refusals | view.bans
    for trainer in view.trainers:
        if trainer.step:
            name = f" ({trainer.name})" if len(view.trainers) > 1 else ""
            progress = f"loss {trainer.loss_text}, {trainer.tokens_per_second:,.0f} tokens/s"
            lines[f"{trainer.name} step {trainer.step}"] = f"step {trainer.step}: {progress}{name}"
    return lines


def _peers(view: SwarmView) -> FittingTable:
    rows: list[tuple[int | str, PeerRow | None]] = []
    for row in view.stages:
        label = row.block.label
        rows += [(label, peer) for peer in row.peers[: row.num_asked]]
        rows += [(label, None)] if label in view.empty_stages else []
    strips = _strips(PeerRow, [peer for _, peer in rows], if_none=Text("no peer", style="bold red"))
    stages = Strip(Column("stage", 0, ""), [Text(str(stage)) for stage, _ in rows])
    # There are no lines between the columns, so that more columns fit.
    frame = partial(
        Table, title=f"run {escape(view.run)}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    return FittingTable([stages, *strips], frame)


def _strips(record: type, rows: Sequence[object | None], if_none: Text | None = None) -> list[Strip]:
    """The columns that the rows need. A row that is None has `if_none` in the first column, and nothing else."""
    strips = []
    for number, (name, column) in enumerate(needed_columns(record, [row for row in rows if row is not None]).items()):
        absent = if_none if if_none is not None and number == 0 else Text()
        # Cells are Text and not markup, because names come from strangers.
        cells = [
            absent
            if row is None
            else Text(
                column.text(row), style=column.styles.get(getattr(row, name), ""), no_wrap=True, overflow="ellipsis"
            )
            for row in rows
        ]
        strips.append(Strip(column, cells))
    return strips


def _warnings(view: SwarmView) -> list[str]:
    last = {stage: f" ({peer.in_words})" for stage, peer in view.last_peers.items()}
    waiting = {stage: f", and {paths} cannot go on" for stage, paths in view.waiting_paths.items()}
    return [
        *(
            f"stage {stage} has no peer{last.get(stage, '')}{waiting.get(stage, '')}: "
            + remedy(view.join_command, stage, view.round, may_return=view.may_return(stage))
            for stage in view.empty_stages
        ),
        *(
            f"no peer of stage {stage} answers ({', '.join(names)}): just died, frozen, or out of reach from here"
            f"{last.get(stage, '')}{waiting.get(stage, '')}"
            for stage, names in view.silent_stages.items()
        ),
    ]
