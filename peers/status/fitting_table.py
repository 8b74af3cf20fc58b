"""A table with as many of its columns as the terminal has room for; outside a terminal, with all of them.

Used by live_table.py. Each column has a rank, and those of the highest ranks are left out first; a line says which.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from peers.status.figure import Column

ANY_WIDTH = 1 << 16
"""More characters than any table is wide."""


@dataclass(frozen=True)
class Strip:
    """One column with its cells."""

    column: Column
    cells: Sequence[Text]


class FittingTable:
    """A rich renderable, which chooses its columns each time it is drawn."""

    def __init__(self, strips: Sequence[Strip], frame: Callable[[], Table]) -> None:
        """
        Args:
            strips: the columns, from left to right.
            frame: makes a table without columns, which has the title and the lines between cells.
        """
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
