"""A trainer's figures, to which each of its steps adds: how far the swarm is, and what this trainer has run.

Kept by report.py, read for the trainer's announcement, and written down at the end.
"""

from collections.abc import Mapping

from swarm.config import RunConfig
from swarm.data import entropy
from swarm.data.corpora import Corpus
from swarm.data.held_out import HeldOutLoss
from swarm.pipeline.train_loop import Step

Figure = float | Mapping[str, float] | None
"""A number, or a number for each dataset by its name; None if it is not known."""


class Figures:
    """The figures of one run of the trainer. Only microbatches that this trainer ran, and their targets, are
    counted."""

    def __init__(self, config: RunConfig) -> None:
        self.first_step = 0
        self.step_number = 0
        self.first_loss: float | None = None
        self.loss: float | None = None
        self.first_validation_loss: float | None = None
        """The loss on held-out text before the first step."""
        self.validation: HeldOutLoss | None = None
        self.validation_step = 0
        """The step of which `validation` is."""
        self.own_tokens = 0
        self.num_microbatches = 0
        self.num_rerouted = 0
        self.tokens_per_second = 0.0
        """The tokens per second of the whole swarm, in the last step."""
        self.run_samples: int | None = None
        """Samples of the run; None before the first step."""
        self._round_samples = config.rounds.round_samples
        self._sequence_length = config.data.sequence_length
        self._seconds = 0.0

    def begin(self, first_step: int) -> None:
        """Begin at this step: the swarm is there now."""
        self.first_step = self.step_number = first_step

    def add(self, step: Step) -> None:
        """Add the figures of a step."""
        totals, report = step.totals, step.report
        self.step_number = step.number
        if (loss := totals.loss) is not None:
            self.loss = loss
            self.first_loss = self.loss if self.first_loss is None else self.first_loss
        self.own_tokens += totals.num_targets
        self.num_microbatches += totals.num_microbatches
        self.num_rerouted += totals.num_rerouted
        self._seconds += step.seconds
        usual, before = self._round_samples, self.run_samples
        if report:
            self.run_samples = report.run_samples
        else:
            self.run_samples = step.number * usual if before is None else before + usual
        # After a stage has come back from a checkpoint, the run has fewer samples than before.
        gained = usual if before is None else max(0, self.run_samples - before)
        self.tokens_per_second = gained * self._sequence_length / max(step.seconds, 1e-9)

    def evaluated(self, validation: HeldOutLoss) -> None:
        """Take the losses on held-out text that were just computed."""
        self.validation, self.validation_step = validation, self.step_number

    @property
    def validation_loss(self) -> float | None:
        """The loss on held-out text that was computed last; None before the first."""
        return None if self.validation is None else self.validation.mean

    @property
    def total_tokens(self) -> int:
        """The tokens of the run up to this step."""
        return (self.run_samples or 0) * self._sequence_length

    def _validation(self) -> dict[str, Figure]:
        by_source = {} if self.validation is None else self.validation.by_source
        return {"validation_loss": self.validation_loss, "validation_losses": by_source}

    def evaluation(self) -> dict[str, Figure]:
        """The held-out losses, and the step at which they were computed."""
        return {"step": self.step_number, **self._validation()}

    def summary(self, corpus: Corpus) -> dict[str, Figure]:
        """How the run began and ended, and what counting bigrams alone would reach."""
        return {
            "first_loss": self.first_loss,
            "final_loss": self.loss,
            "first_validation_loss": self.first_validation_loss,
            **self._validation(),
            # Counts of tokens mean something only for text, not for conversations.
            "unigram_entropy": entropy.unigram_entropy(corpus) if corpus.is_text else None,
            "bigram_entropy": entropy.bigram_entropy(corpus) if corpus.is_text else None,
            "tokens": self.own_tokens,
            "tokens_per_second": self.own_tokens / max(self._seconds, 1e-9),
            "microbatches_completed": self.num_microbatches,
            "microbatches_rerouted": self.num_rerouted,
            "steps": self.step_number - self.first_step,
        }
