"""Draws a plot of a run's loss from its metrics file. matplotlib is imported only then."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.metrics.log import OF_SOURCE, read_current


def plot_loss(metrics: Path, image: Path) -> None:
    """Draw training and validation loss over the steps as a PNG, with the swarm's events as vertical lines.

    Of a file with several trainings, the last one is drawn.

    Raises:
        OSError: the file cannot be read, or the image not written.
    """
    from matplotlib.figure import Figure

    rows = read_current(metrics)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    axes.plot(*_series(rows, "train/loss"), label="training")
    validation = _series(rows, "val/loss")
    if validation[0]:
        axes.plot(*validation, marker="o", markersize=3, label="validation")
    for name in dict.fromkeys(name for row in rows for name in row if name.startswith(OF_SOURCE)):
        axes.plot(*_series(rows, name), linestyle="--", linewidth=1, label=_plain(name.removeprefix(OF_SOURCE)))
    for row in rows:
        if "event" in row:
            axes.axvline(row["step"], color="grey", linestyle=":", linewidth=1)
            axes.text(
                row["step"],
                0.98,
                f" {row['event']}",
                transform=axes.get_xaxis_transform(),
                rotation=90,
                va="top",
                fontsize=7,
                color="grey",
            )
    axes.legend(loc="upper right")
    figure.savefig(image, dpi=120, format="png")


def _plain(name: str) -> str:
    """The name with its dollar signs escaped: matplotlib takes text between two of them as a formula."""
    return name.replace("$", r"\$")


def _series(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """The steps and values of the rows that have a figure."""
    known = [row for row in rows if row.get(name) is not None]
    return [row["step"] for row in known], [row[name] for row in known]
