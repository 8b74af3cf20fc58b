"""The figures of a training: metrics.jsonl, reports to other services, and a plot of the loss.

The file has one line of strict JSON for each step, and one for each event of the swarm. The trainer writes steps and
swarm-local writes events; both may append to one file at once.
"""

import json
import logging
import math
import queue
import statistics
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from swarm.machine.json_file import LineFile
from swarm.training.inner_steps import InnerSteps
from swarm.types import Block

logger = logging.getLogger(__name__)

BEGINS = "training begins"
"""The event that a trainer writes when it begins, with the swarm's present step."""

ID_LENGTH = 8
"""How much of a peer's id names its figures."""
OF_SOURCE = "val/loss/"
"""The prefix of the names of single datasets' held-out losses."""

Value = float | int | str | None

_QUEUE_LENGTH = 1000
Figures = tuple[int, dict[str, Any]]
"""A step, and the figures that are known of it."""


class Reporter(ABC):
    """Hands each step's figures to one service, in a thread behind a bounded queue, so that the service can neither
    stall nor end the training. Its first error is logged, and ends the reporting."""

    def __init__(self, name: str) -> None:
        """Start the thread and return at once."""
        self._name = name
        self._queue: queue.Queue[Figures | None] = queue.Queue(_QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _send(self, steps: Iterator[Figures]) -> None:
        """Import the service's library, report all steps, and close. Called once, in the thread; may raise anything."""

    def log(self, values: Mapping[str, Any], *, step: int) -> None:
        """Queue the known figures of a step. They are dropped if the service is far behind, or has failed."""
        known = {name: value for name, value in values.items() if value is not None}
        try:
            self._queue.put_nowait((step, known))
        except queue.Full:
            logger.debug("%s is behind: step %d is not reported", self._name, step)

    def close(self, timeout_seconds: float) -> bool:
        try:
            self._queue.put(None, timeout=timeout_seconds)
        except queue.Full:
            return False
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            logger.warning(
                "%s did not finish within %.0f s: its last figures may be missing", self._name, timeout_seconds
            )
            return False
        return True

    def _run(self) -> None:
        try:
            self._send(iter(self._queue.get, None))
        except BaseException as error:  # noqa: BLE001 - such libraries raise all kinds, SystemExit among them
            logger.warning(
                "no more reports to %s, the training goes on: %s: %s", self._name, type(error).__name__, error
            )
            while self._queue.get() is not None:
                pass


def _figure(name: str, **options: Any) -> Any:
    return field(metadata={"name": name}, **options)


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One step, which is a round of the whole swarm, as a trainer saw it. None means unknown."""

    step: int = _figure("step")
    loss: float = _figure("train/loss")
    """Mean over the step's tokens, in nats."""
    gradient_norm: float | None = _figure("train/gradient_norm")
    """Norm of the averaged gradient (synchronous) or pseudo-gradients (DiLoCo), over all stages."""
    learning_rate: float | None = _figure("train/learning_rate")
    tokens_per_sec: float = _figure("train/tokens_per_sec")
    """The tokens per second of the whole swarm, over the step."""
    total_tokens: int = _figure("train/total_tokens")
    """The tokens of the whole swarm, since the run began."""
    step_time: float = _figure("train/step_time")
    """Seconds since this trainer's last step, including an evaluation in between."""
    dispatch_time: float = _figure("train/dispatch_time")
    """The seconds of this step during which microbatches were under way."""
    aggregate_time: float | None = _figure("train/aggregate_time")
    """The seconds that the slowest stage spent on averaging in this step."""
    successful_workers: int | None = _figure("train/successful_workers")
    """Stage peers that took part in the round's averages."""
    compression_ratio: float | None = _figure("train/compression_ratio")
    """The float32 size of what was averaged, over its size on the wire."""
    alive_peers: int | None = _figure("averaging/alive_peers", default=None)
    """Live stage peers, whether they took part in the averages or not."""
    averaged_fraction: float | None = _figure("averaging/fraction", default=None)
    """The share of a stage's parameters that the round averaged, as the mean over the stages."""
    averaged_bytes: int | None = _figure("averaging/bytes", default=None)
    """Bytes sent and received for the round's averages, summed over one peer of each stage."""
    exchange_time: float | None = _figure("averaging/exchange_time", default=None)
    """Seconds of the slowest stage's exchange."""
    wait_time: float | None = _figure("averaging/wait_time", default=None)
    """The longest time, in seconds, for which a stage's round was closed without being exchanged, before and after the
    exchange."""
    contribution_norm: float | None = _figure("averaging/contribution_norm", default=None)
    """The norm of the contributions of one peer of each stage, before averaging."""
    attempts: int | None = _figure("averaging/attempts", default=None)
    """The most attempts at the round that a stage needed."""
    aborted_attempts: int | None = _figure("averaging/aborted", default=None)
    """Aborted attempts of one peer of each stage, since it started."""
    residual_bytes: int | None = _figure("averaging/residual_bytes", default=None)
    """Bytes that error feedback keeps, summed over one peer of each stage."""
    validation_loss: float | None = _figure("val/loss", default=None)
    """The loss in nats per token on held-out text, in steps that evaluate."""
    validation_losses: Mapping[str, float] = field(default_factory=dict)
    """If there are several datasets, the same loss for each, by the dataset's name."""
    device_memory_bytes: int | None = _figure("device/memory_bytes", default=None)
    """The most device memory that any stage peer has used."""
    inner_steps: Mapping[Block, InnerSteps] = field(default_factory=dict)
    """DiLoCo only: the inner steps of one peer of each block."""
    time_shares: Mapping[Block, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """By block and peer id: what a few of its peers did with the last minute."""

    def named(self) -> dict[str, Value]:
        """The figures under their names in the JSONL file, in Weights & Biases and in TensorBoard."""
        figures = {known.metadata["name"]: getattr(self, known.name) for known in fields(self) if known.metadata}
        return {**figures, **_by_source(self.validation_losses), **self._inner(), **self._times()}

    def _times(self) -> dict[str, Value]:
        named: dict[str, Value] = {}
        for block, of_peers in self.time_shares.items():
            for name in next(iter(of_peers.values()), {}):
                mean = statistics.fmean(shares[name] for shares in of_peers.values())
                figure = {f"{peer_id[:ID_LENGTH]}/{name}": shares[name] for peer_id, shares in of_peers.items()}
                named |= {f"time/stage_{block}/{each}": value for each, value in {name: mean, **figure}.items()}
        return named

    def _inner(self) -> dict[str, Value]:
        named: dict[str, Value] = {}
        for stage, steps in self.inner_steps.items():
            named["inner/configured_samples"] = steps.configured_samples
            named |= {
                f"inner/stage_{stage}/steps": steps.count,
                f"inner/stage_{stage}/samples_per_step": steps.samples_per_step,
                f"inner/stage_{stage}/staleness": steps.mean_staleness,
                f"inner/stage_{stage}/largest_staleness": steps.largest_staleness,
            }
        return named


class MetricsLog:
    """Appends to a JSONL file, and hands steps to reporters. If the disk is full, lines are lost without an error."""

    def __init__(self, path: Path, *, reporters: Sequence[Reporter] = ()) -> None:
        """Open the file and make its folder. Raises OSError if that fails."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(path, "figures")
        self._reporters = reporters

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def written(self) -> str:
        return "figures" if self._file.is_complete else "some figures, and others are lost,"

    def step(self, metrics: StepMetrics) -> None:
        self._report(metrics.step, metrics.named())

    def go_back(self, step: int) -> None:
        """Forget the figures of later steps, because training goes on from this one and takes them again."""

        def is_earlier(line: str) -> bool:
            try:
                return int(json.loads(line)["step"]) <= step
            except (ValueError, TypeError, KeyError):
                return True

        self._file.keep(is_earlier)

    def evaluation(self, step: int, loss: float, by_source: Mapping[str, float]) -> None:
        """Append the losses on held-out text at a step, as a line of their own; with several datasets, also of each."""
        self._report(step, {"step": step, "val/loss": loss, **_by_source(by_source)})

    def event(self, step: int, text: str) -> None:
        self._append({"step": step, "event": text})

    def _report(self, step: int, figures: Mapping[str, Value]) -> None:
        values = {name: _finite(value) for name, value in figures.items()}
        self._append(values)
        for reporter in self._reporters:
            reporter.log(values, step=step)

    def _append(self, values: Mapping[str, Value]) -> None:
        self._file.append(json.dumps(values, allow_nan=False))


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file, without those that a killed writer left unfinished. Raises OSError."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                values = json.loads(line)
            except json.JSONDecodeError:
                continue
            yield values


def read_current(path: Path) -> list[dict[str, Any]]:
    """The lines of the last training in the file. Raises OSError.

    A training may begin at an earlier step than the line before it, because it went back to a checkpoint, or is of
    another run. Then earlier lines with later steps are left out.
    """
    rows: list[dict[str, Any]] = []
    for row in read(path):
        if row.get("event") == BEGINS:
            rows = [earlier for earlier in rows if earlier["step"] <= row["step"]]
        rows.append(row)
    return rows


def _by_source(losses: Mapping[str, float]) -> dict[str, Value]:
    return {f"{OF_SOURCE}{name}": loss for name, loss in losses.items()}


def _finite(value: Value) -> Value:
    """The value, or None if it is not finite: JSON knows neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
                row["step"], 0.98, f" {row['event']}", transform=axes.get_xaxis_transform(), rotation=90, va="top",
                fontsize=7, color="grey",
            )  # fmt: skip
    axes.legend(loc="upper right")
    figure.savefig(image, dpi=120, format="png")


def _plain(name: str) -> str:
    """The name with its dollar signs escaped: matplotlib takes text between two of them as a formula."""
    return name.replace("$", r"\$")


def _series(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """The steps and values of the rows that have a figure."""
    known = [row for row in rows if row.get(name) is not None]
    return [row["step"] for row in known], [row[name] for row in known]
