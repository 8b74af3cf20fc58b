"""Reports how training goes: a progress bar, log lines, metrics.jsonl, and the files that are written at the end."""

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from peers.trainer.figures import Figure, Figures
from swarm.config import Timeline
from swarm.data.corpora import Corpus
from swarm.data.microbatches import HeldOutLoss
from swarm.hop.answers import Obstacle
from swarm.machine import json_file
from swarm.machine.clock import Clock
from swarm.machine.words import Repeats
from swarm.metrics import BEGINS, MetricsLog, StepMetrics, plot_loss
from swarm.pipeline.train_loop import Step
from swarm.training.inner_steps import InnerSteps
from swarm.types import Block

logger = logging.getLogger(__name__)

GAP_SECONDS = 5.0
"""The shortest time between two log lines about a stage that takes no work. Several peers may each name another
cause."""
WAITS_SECONDS = 600.0
"""The shortest time between two such lines with the same cause, unless a step comes in between."""
EMPTY_SECONDS = 30.0
"""How long after a stage was found without a peer it counts as the cause why peers of earlier stages are busy."""


class Report(contextlib.AbstractContextManager["Report"]):
    """Reports every step that it is told of. Inside its `with` block the progress bar is shown."""

    def __init__(
        self, timeline: Timeline, *, steps: int, output: Path, metrics: MetricsLog, console: Console, clock: Clock,
        remedy: Callable[[Block], str],
    ) -> None:  # fmt: skip
        """With 0 `steps` there is only an evaluation. `remedy` says what the user can do about a block without a
        peer."""
        self._clock = clock
        self._timeline = timeline
        self._steps = steps
        self.figures = Figures(timeline)
        self._output = output
        self._metrics = metrics
        self._console = console
        self._remedy = remedy
        self._waits, self._busy = Repeats(clock, WAITS_SECONDS), Repeats(clock)
        self._said_at: dict[Block, float] = {}
        self._empty_at: dict[Block, float] = {}
        self._warned: set[Block] = set()
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console,
            disable=not (steps and console.is_terminal),
        )  # fmt: skip
        self._task: TaskID = self._bar.add_task("train", total=steps, note="")

    def __enter__(self) -> "Report":
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def begin(self, first_step: int) -> None:
        self.figures.begin(first_step)
        self._metrics.event(first_step, BEGINS)

    def waiting(self, block: Block, obstacle: Obstacle) -> None:
        """Log why no peer of a block takes work: each cause once until the next step, with a pause between two causes.
        With slow stages, all peers are often merely busy, so this cause is logged only now and then."""
        now = self._clock.monotonic()
        if obstacle.is_empty_stage:
            self._empty_at[block] = now
        else:
            self._empty_at.pop(block, None)
        if obstacle.is_business:
            # Peers before an empty stage are busy with microbatches that wait for that stage. Its own line names the
            # cause.
            if any(later.stage > block.stage and now - at < EMPTY_SECONDS for later, at in self._empty_at.items()):
                return
            if self._busy.count(block):
                logger.info("waiting: %s", obstacle.in_words(block))
            return
        if now - self._said_at.get(block, -math.inf) < GAP_SECONDS or not self._waits.count((block, obstacle.causes)):
            return
        self._said_at[block] = now
        cure = f": {self._remedy(block)}" if obstacle.is_empty_stage else ""
        logger.warning("waiting: %s%s", obstacle.in_words(block), cure)
        what = "has no peer" if obstacle.is_empty_stage else "takes no work"
        self._metrics.event(self.figures.step_number, f"stage {block} {what}")

    def within(self, num_microbatches: int) -> None:
        config = self._timeline.at(self.figures.step_number)
        share = min(0.99, num_microbatches / config.microbatches_per_round)
        self._bar.update(self._task, completed=self.figures.step_number - self.figures.first_step + share)

    def step(self, step: Step, validation: HeldOutLoss | None) -> None:
        self._empty_at.clear()
        self._waits = Repeats(self._clock, WAITS_SECONDS)
        report, figures = step.report, self.figures
        figures.add(step)
        if validation is not None:
            figures.evaluated(validation)
        self._metrics.step(
            StepMetrics(
                step=step.number,
                loss=float("nan") if figures.loss is None else figures.loss,
                gradient_norm=report.gradient_norm if report else None,
                learning_rate=report.learning_rate if report else None,
                tokens_per_sec=figures.tokens_per_second,
                total_tokens=figures.total_tokens,
                step_time=step.seconds,
                dispatch_time=step.totals.busy_seconds,
                aggregate_time=report.cost.seconds if report else None,
                successful_workers=report.num_members if report else None,
                compression_ratio=report.cost.compression_ratio if report else None,
                alive_peers=report.num_alive if report else None,
                averaged_fraction=report.averaged_fraction if report else None,
                averaged_bytes=report.cost.bytes_sent + report.cost.bytes_received if report else None,
                exchange_time=report.cost.exchange_seconds if report else None,
                wait_time=report.wait_seconds if report else None,
                contribution_norm=report.cost.contribution_norm if report else None,
                attempts=report.num_attempts if report else None,
                aborted_attempts=report.num_aborted if report else None,
                residual_bytes=report.cost.residual_bytes if report else None,
                validation_loss=None if validation is None else validation.mean,
                validation_losses={} if validation is None else validation.of_several,
                device_memory_bytes=report.device_bytes if report else None,
                inner_steps=report.inner_steps if report else {},
                time_shares=report.time_shares if report else {},
            )
        )
        self._warn(report.inner_steps if report else {})
        self._say(step.number, validation)

    def _warn(self, inner_steps: Mapping[Block, InnerSteps]) -> None:
        for block, steps in inner_steps.items():
            if steps.fault and block not in self._warned:
                self._warned.add(block)
                logger.warning("stage %s: %s", block, steps.fault)

    def evaluated_before(self, validation: HeldOutLoss) -> None:
        self.figures.first_validation_loss = validation.mean
        logger.info("step %d: validation %.3f before the first step", self.figures.step_number, validation.mean)
        self.evaluated(validation)

    def evaluated(self, validation: HeldOutLoss) -> None:
        self.figures.evaluated(validation)
        self._metrics.evaluation(self.figures.step_number, validation.mean, validation.of_several)

    def goodbye(self, *, interrupted: bool) -> None:
        figures = self.figures
        by_source = {} if figures.validation is None else figures.validation.of_several
        written = f"{self._metrics.written} in {self._output}"
        if not self._steps:
            found = figures.validation_loss
            told = "not evaluated" if found is None else f"validation loss {found:.4f}; {written}"
            print(f"step {figures.step_number}: {told}")
            self._print(by_source)
            return
        how = "stopped" if interrupted else "finished"
        loss = "" if figures.loss is None else f", loss {figures.loss:.3f}"
        held_out = "" if figures.validation_loss is None else f", validation loss {figures.validation_loss:.3f}"
        if held_out and figures.validation_step != figures.step_number:
            # A trainer that is told to stop does not wait for another evaluation.
            held_out += f" at step {figures.validation_step}"
        if held_out and figures.first_validation_loss is not None and figures.validation_step > figures.first_step:
            held_out += f" ({figures.first_validation_loss:.3f} before the first step)"
        print(
            f"{how} at step {figures.step_number}{loss}{held_out}; {written}. The swarm keeps its state: start "
            "swarm-trainer again to go on."
        )
        self._print(by_source)

    def _print(self, by_source: Mapping[str, float]) -> None:
        width = max(map(len, by_source), default=0)
        for name, loss in by_source.items():
            print(f"  {name:{width}}  {loss:.4f}")

    def _say(self, number: int, validation: HeldOutLoss | None) -> None:
        held_out = "" if validation is None else f"  validation {validation.mean:.3f}"
        # Other trainers may have run all of the round so far.
        loss = "no loss of its own yet" if self.figures.loss is None else f"loss {self.figures.loss:.3f}"
        rate, total = self.figures.tokens_per_second, self.figures.total_tokens
        note = f"{loss}{held_out}  {rate:,.0f} tokens/s  {total:,} tokens in all"
        self._bar.update(self._task, completed=number - self.figures.first_step, note=note)
        if not self._console.is_terminal:
            logger.info("step %d: %s", number, note)
        if validation is not None and validation.of_several:
            told = ", ".join(f"{name} {loss:.3f}" for name, loss in validation.of_several.items())
            logger.info("step %d: validation: %s", number, told)

    def files(self, corpus: Corpus, *, interrupted: bool) -> dict[str, Callable[[Path], object]]:
        """What is due at the end: by name, functions that write to a path."""
        if not self._steps:
            return {} if interrupted else {"evaluation.json": lambda path: _write(path, self.figures.evaluation())}
        files: dict[str, Callable[[Path], object]] = {
            "loss.png": lambda path: plot_loss(self._output / "metrics.jsonl", path)
        }
        if not interrupted:
            # How the run began and ended, and what counting bigrams alone would reach.
            files["summary.json"] = lambda path: _write(path, self.figures.summary(corpus))
        return files


def _write(path: Path, figures: Mapping[str, Figure]) -> None:
    json_file.write_object(path, {name: _finite(figure) for name, figure in figures.items()})


def _finite(figure: Figure) -> object:
    """The figure, with None in the place of NaN and infinity, which JSON does not have."""
    if isinstance(figure, Mapping):
        return {name: _finite(each) for name, each in figure.items()}
    return figure if figure is None or math.isfinite(figure) else None
