"""What a trainer tells: a progress bar, metrics.jsonl, and summary.json at the end.

Used by swarm-trainer. Only writes down what it is given.
"""

import contextlib
import json
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from swarm.config import RunConfig
from swarm.data import entropy
from swarm.data.corpora import Corpus
from swarm.metrics.log import BEGINS, MetricsLog, StepMetrics
from swarm.pipeline.train_loop import Step
from swarm.training.inner_steps import InnerSteps

logger = logging.getLogger(__name__)


class Report(contextlib.AbstractContextManager["Report"]):
    """Hears of every step; the progress bar is there while its `with` block runs."""

    def __init__(
        self, config: RunConfig, *, steps: int, output: Path, metrics: MetricsLog, console: Console,
        why_silent: Callable[[int], str | None] = lambda stage: None,
    ) -> None:  # fmt: skip
        """
        Args:
            why_silent: who is announced at a stage and does not answer, and why; None where nobody is.
        """
        self._why_silent = why_silent
        self.first_step = 0
        self.step_number = 0
        self.first_loss: float | None = None
        self.loss: float | None = None
        self.validation_loss: float | None = None
        self.own_tokens = 0
        self.num_microbatches = 0
        self.num_rerouted = 0
        self.tokens_per_second = 0.0
        self.seconds = 0.0
        self._run_samples: int | None = None
        """Samples of the run; not known before a step of which the stages told."""
        self._config = config
        self._output = output
        self._metrics = metrics
        self._console = console
        self._waiting_for: set[tuple[int, bool]] = set()
        self._warned: set[int] = set()
        """Stages of whose inner steps something was said."""
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task: TaskID = self._bar.add_task("train", total=steps, note="")

    def __enter__(self) -> "Report":
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def begin(self, first_step: int) -> None:
        """The swarm is at this step now."""
        self.first_step = self.step_number = first_step
        self._metrics.event(first_step, BEGINS)

    def waiting(self, stage: int) -> None:
        """Say that nobody at a stage can be reached: once, until the next step, and again when nobody is announced."""
        silent = self._why_silent(stage)
        if (stage, silent is None) in self._waiting_for:
            return
        self._waiting_for.add((stage, silent is None))
        if silent is None:
            logger.warning(
                "waiting: stage %d has no peer; start one with swarm-peer --stage %d --initial-peers ...", stage, stage
            )
            self._metrics.event(self.step_number, f"stage {stage} has no peer")
            return
        logger.warning(
            "waiting: stage %d does not answer: %s; if it runs, see that its --port can be reached from here, and that "
            "its --announce is right", stage, silent,
        )  # fmt: skip
        self._metrics.event(self.step_number, f"stage {stage} does not answer")

    def step(self, step: Step, validation_loss: float | None) -> None:
        """Log a step."""
        self._waiting_for.clear()
        totals, report = step.totals, step.report
        self.step_number = step.number
        if totals.losses:
            # Peers may report anything that is finite; the exact mean of that is finite too, where a sum may not be.
            self.loss = statistics.mean(totals.losses)
            self.first_loss = self.loss if self.first_loss is None else self.first_loss
        self.validation_loss = self.validation_loss if validation_loss is None else validation_loss
        self.own_tokens += totals.num_tokens
        self.num_microbatches += totals.num_microbatches
        self.num_rerouted += totals.num_rerouted
        self.seconds += step.seconds
        usual, before = self._config.rounds.round_samples, self._run_samples
        if report:
            self._run_samples = report.run_samples
        else:
            self._run_samples = step.number * usual if before is None else before + usual
        # A stage that came back from a checkpoint has fewer than before.
        gained = usual if before is None else max(0, self._run_samples - before)
        length = self._config.data.sequence_length
        self.tokens_per_second = gained * length / max(step.seconds, 1e-9)
        self._metrics.step(
            StepMetrics(
                step=step.number,
                loss=float("nan") if self.loss is None else self.loss,
                gradient_norm=report.gradient_norm if report else None,
                learning_rate=report.learning_rate if report else None,
                tokens_per_sec=self.tokens_per_second,
                total_tokens=self._run_samples * length,
                step_time=step.seconds,
                dispatch_time=totals.busy_seconds,
                aggregate_time=report.aggregate_seconds if report else None,
                successful_workers=report.num_members if report else None,
                compression_ratio=report.compression_ratio if report else None,
                alive_peers=report.num_alive if report else None,
                averaged_fraction=report.averaged_fraction if report else None,
                averaged_bytes=report.num_bytes if report else None,
                exchange_time=report.exchange_seconds if report else None,
                wait_time=report.wait_seconds if report else None,
                contribution_norm=report.contribution_norm if report else None,
                attempts=report.num_attempts if report else None,
                aborted_attempts=report.num_aborted if report else None,
                residual_bytes=report.residual_bytes if report else None,
                validation_loss=validation_loss,
                device_memory_bytes=report.device_bytes if report else None,
                inner_steps=report.inner_steps if report else (),
            )
        )
        self._warn(report.inner_steps if report else ())
        self._say(step.number, validation_loss)

    def _warn(self, inner_steps: Sequence[InnerSteps]) -> None:
        """Say what makes the run learn less than it might: once of each stage."""
        for stage, steps in enumerate(inner_steps):
            if steps.fault and stage not in self._warned:
                self._warned.add(stage)
                logger.warning("stage %d: %s", stage, steps.fault)

    def final(self, validation_loss: float | None) -> None:
        """The evaluation at the end."""
        if validation_loss is not None:
            self.validation_loss = validation_loss
            self._metrics.event(self.step_number, f"final validation loss {validation_loss:.4f}")

    def goodbye(self, *, interrupted: bool) -> None:
        """Say where training is."""
        how = "stopped" if interrupted else "finished"
        loss = "" if self.loss is None else f", loss {self.loss:.3f}"
        held_out = "" if self.validation_loss is None else f", validation loss {self.validation_loss:.3f}"
        print(
            f"{how} at step {self.step_number}{loss}{held_out}; figures in {self._output}. The swarm keeps its "
            "state: start swarm-trainer again to go on."
        )

    def _say(self, number: int, validation_loss: float | None) -> None:
        held_out = "" if validation_loss is None else f"  validation {validation_loss:.3f}"
        note = f"loss {self.loss or float('nan'):.3f}{held_out}  {self.tokens_per_second:,.0f} tokens/s"
        self._bar.update(self._task, completed=number - self.first_step, note=note)
        if not self._console.is_terminal:
            logger.info("step %d: %s", number, note)

    def write_summary(self, corpus: Corpus) -> None:
        """Write summary.json: how the run began and ended, and what counting bigrams alone would reach."""
        summary = {
            "first_loss": self.first_loss,
            "final_loss": self.loss,
            "validation_loss": self.validation_loss,
            "unigram_entropy": entropy.unigram_entropy(corpus),
            "bigram_entropy": entropy.bigram_entropy(corpus),
            "tokens": self.own_tokens,
            "tokens_per_second": self.own_tokens / max(self.seconds, 1e-9),
            "microbatches_completed": self.num_microbatches,
            "microbatches_rerouted": self.num_rerouted,
            "steps": self.step_number - self.first_step,
        }
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in summary.items()}
        text = json.dumps(finite, indent=2, allow_nan=False)
        (self._output / "summary.json").write_text(text + "\n", encoding="utf-8")
