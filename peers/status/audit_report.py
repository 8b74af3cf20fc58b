"""Draws an audit's result for people: a table of figures, and a line for each violation.

Used by swarm-status --audit.
"""

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from swarm.audit.verdict import Report
from swarm.machine.words import counted

_FIGURES = (
    "rounds_committed", "rounds_aborted", "duplicates", "missing", "replayed", "rolled_back", "digests_compared",
    "digests_differing",
)  # fmt: skip


def render(report: Report) -> RenderableType:
    """The table, and below it the violations and the verdict."""
    table = Table("figure", "value", title=f"{report.setting} run {report.run}, {counted(report.files, 'file')}")
    figures, found = report.to_json(), report.findings
    for name in _FIGURES:
        table.add_row(name, str(figures[name]))
    table.add_row("lost_share", f"{report.lost_share:.4f}")
    for stage in report.stages:
        microbatches = counted(stage.microbatches, "microbatch")
        counts = f"{counted(stage.rounds, 'round')}, {stage.first_attempt} at the first attempt, {microbatches}"
        table.add_row(f"stage {stage.stage}", counts + (f", {stage.lost} lost" if stage.lost else ""))
    lines = [escape(violation) for violation in found.violations]
    if (more := found.num_violations - len(lines)) > 0:
        lines.append(f"and {more} more")
    return Group(table, *lines, "proven" if report.proven else f"refuted: {counted(found.num_violations, 'violation')}")
