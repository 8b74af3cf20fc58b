"""Draws a SwarmView: a table that stays in place on a terminal, a line a step anywhere else.

Used by swarm-local and by swarm-status. Never asks anybody anything.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from peers.status.view import PeerRow, SwarmView, TrainerRow

_EVENTS_SHOWN = 5
_LARGE_LAG_SECONDS = 0.2
_STATE_STYLES = {
    "serving": "green", "joining": "yellow", "moving": "yellow", "leaving": "yellow", "unreachable": "red",
}  # fmt: skip


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

    def show(self, view: SwarmView) -> None:
        """Replace what is shown; without a terminal, print the lines that are new."""
        if self._live:
            self._live.update(render(view), refresh=True)
            return
        lines = plain_lines(view)
        for key, line in lines.items():
            if key not in self._printed:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._printed = lines


def render(view: SwarmView) -> RenderableType:
    """The view as a rich renderable."""
    parts: list[RenderableType] = [_peers(view)]
    if view.trainers:
        parts.append(_trainers(view.trainers))
    parts += [Text(line, style="bold red") for line in (*_warnings(view), *_refusals(view).values())]
    parts += [Text(event, style="dim") for event in view.events[-_EVENTS_SHOWN:]]
    return Group(*parts)


def plain_lines(view: SwarmView) -> dict[str, str]:
    """Events, warnings, and each trainer's step, under keys by which a line is known to be old news."""
    lines = {line: line for line in (*view.events, *_warnings(view))} | _refusals(view)
    for trainer in view.trainers:
        if trainer.step:
            name = f" ({trainer.name})" if len(view.trainers) > 1 else ""
            progress = f"loss {_loss(trainer)}, {trainer.tokens_per_second:,.0f} tokens/s"
            lines[f"{trainer.name} step {trainer.step}"] = f"step {trainer.step}: {progress}{name}"
    return lines


class _Column(NamedTuple):
    """A column of the peers' table."""

    heading: str
    cell: Callable[[PeerRow], RenderableType]
    is_shown: Callable[[PeerRow], bool] | None = None
    """The column is there only if this holds for some peer: else it would take room from the peers' names."""
    justify: Literal["left", "right"] = "right"


def _peers(view: SwarmView) -> Table:
    peers = [peer for row in view.stages for peer in row.peers]
    columns = [column for column in _COLUMNS if column.is_shown is None or any(map(column.is_shown, peers))]
    # Without lines between the columns: all of them are to fit.
    table = Table(title=f"run {escape(view.run)}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("stage", justify="right")
    for column in columns:
        table.add_column(column.heading, justify=column.justify)
    for row in view.stages:
        for peer in row.peers:
            table.add_row(str(row.stage), *(column.cell(peer) for column in columns))
        if row.stage in view.empty_stages:
            table.add_row(str(row.stage), Text("no peer", style="bold red"))
    return table


def _state(peer: PeerRow) -> str:
    if peer.moving_to is not None:
        return f"moving to {peer.moving_to}"
    return peer.state if peer.moving_from is None else f"moving from {peer.moving_from}"


_COLUMNS = (
    _Column("peer", lambda peer: escape(peer.name), justify="left"),
    _Column("state", lambda peer: Text(_state(peer), style=_STATE_STYLES.get(peer.state, "")), justify="left"),
    _Column("device", lambda peer: escape(peer.device), lambda peer: peer.device not in ("", "cpu"), justify="left"),
    _Column("samples/s", lambda peer: f"{peer.samples_per_second:.1f}"),
    _Column("queue", lambda peer: str(peer.queue_length)),
    _Column("round", lambda peer: str(peer.round)),
    _Column("samples", lambda peer: str(peer.samples)),
    _Column("forwards", lambda peer: str(peer.forwards)),
    _Column("backwards", lambda peer: str(peer.backwards)),
    _Column("re-routed", lambda peer: str(peer.rerouted_backwards)),
    _Column("members", lambda peer: f"{peer.members}/{peer.alive_peers}"),
    _Column(
        "steps",
        lambda peer: f"{peer.inner_steps} x {peer.samples_per_inner_step:.0f}",
        lambda peer: peer.configured_samples_per_inner_step > 0,
    ),
    _Column(
        "late", lambda peer: f"{peer.staleness:.1f}/{peer.largest_staleness}", lambda peer: peer.largest_staleness > 0
    ),
    _Column(
        "lag", lambda peer: f"{peer.loop_lag_seconds:.1f} s", lambda peer: peer.loop_lag_seconds >= _LARGE_LAG_SECONDS
    ),
)


def _trainers(rows: Sequence[TrainerRow]) -> Table:
    table = Table()
    table.add_column("trainer")
    for heading in ("step", "loss", "tokens/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(escape(row.name), str(row.step), _loss(row), f"{row.tokens_per_second:,.0f}")
    return table


def _warnings(view: SwarmView) -> list[str]:
    return [f"stage {stage} has no peer: start one with swarm-peer --stage {stage}" for stage in view.empty_stages]


def _refusals(view: SwarmView) -> dict[str, str]:
    """What peers say of holders that they do not follow. Keys name both peers only: the rest changes at each look."""
    return {
        f"{peer.peer_id} refuses {refusal.partition(' ')[0]}": f"{peer.name}: {refusal}"
        for row in view.stages
        for peer in row.peers
        for refusal in peer.refusals
    }


def _loss(row: TrainerRow) -> str:
    return "-" if row.loss is None else f"{row.loss:.3f}"
