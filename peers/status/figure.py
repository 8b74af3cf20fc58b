"""Figures of a peer or a trainer: each is defined once, with its unit, its meaning, its source and its column.

JSON has all of them; the table has those with a column; the page docs/status.md, which scripts/generate_status_docs
writes, explains each.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from swarm.types import PeerRecord, TrainerRecord


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        heading: the text above the column.
        rank: where a terminal has no room for all columns, those with the highest ranks are left out.
        cell: a format string; `row` in it is the record that has the figure.
        is_shown: the table has the column only if this is true for at least one row, to leave more room for names.
        is_text: whether it is left-justified.
        least_width: characters to which it may be cut to make room; None if it must not be cut.
        styles: the style of a row's cell, by the figure's value.
    """

    heading: str
    rank: int
    cell: str
    _: KW_ONLY
    is_shown: Callable[[Any], bool] | None = None
    is_text: bool = False
    least_width: int | None = None
    styles: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def text(self, row: object) -> str:
        return self.cell.format(row=row)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One field of a record that is shown.

    Attributes:
        help: what the figure is, in one or more sentences.
        unit: the unit of its value; empty if it has none.
        only_grows: whether it counts what happened since the process started.
        is_label: whether it is a word that tells this process from others.
        announced: reads the value from the announcement; None if the announcement does not have it.
        answered: reads the value from the peer's Answer; None if the Answer does not have it.
        column: its column in the table; None if the table does not show it.
    """

    help: str
    unit: str = ""
    only_grows: bool = False
    is_label: bool = False
    announced: Callable[[Any], Any] | None = None
    answered: Callable[[Any], Any] | None = None
    column: Column | None = None


def figure(help: str, *, default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """Make a dataclass's field for a figure. Further arguments are fields of Figure."""
    metadata = {"figure": Figure(help=help, **more)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def number(help: str, **more: Any) -> Any:
    """Make the field of a figure that is a number. It is 0 where it is not known."""
    return figure(help, default=0, **more)


def counter(help: str, **more: Any) -> Any:
    return number(help, only_grows=True, **more)


def bans_of(record: PeerRecord | TrainerRecord) -> tuple[dict[str, Any], ...]:
    """The bans in an announcement: the peers that its sender does not choose, because they failed."""
    return tuple(ban.model_dump() for ban in record.bans)


def figures(record: type) -> dict[str, Figure]:
    return {field.name: field.metadata["figure"] for field in dataclasses.fields(record)}


def needed_columns(record: type, rows: Sequence[object]) -> dict[str, Column]:
    columns = {name: figure.column for name, figure in figures(record).items() if figure.column is not None}
    return {
        name: column for name, column in columns.items() if column.is_shown is None or any(map(column.is_shown, rows))
    }


def read(record: type, announcement: object, answer: object | None) -> dict[str, Any]:
    """The values of a record's figures. Figures that only an answer has are left out if there is none; they keep their
    defaults."""
    values: dict[str, Any] = {}
    for name, each in figures(record).items():
        if answer is not None and each.answered is not None:
            values[name] = each.answered(answer)
        elif each.announced is not None:
            values[name] = each.announced(announcement)
    return values
