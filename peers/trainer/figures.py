"""A trainer's figures, to which each of its steps adds: how far the swarm is, and what this trainer has run.

Kept by report.py, read for the trainer's announcement, and written down at the end.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from swarm.config import Timeline
from swarm.data.corpora import Corpus
from swarm.data.microbatches import HeldOutLoss
from swarm.pipeline.train_loop import Step
from swarm.training.samples import TokenIds

Figure = float | Mapping[str, float] | None
"""A number, or a number for each dataset by its name; None if it is not known."""
_CHUNK_TOKENS = 2**20


class Figures:
    """The figures of one run of the trainer. Only microbatches that this trainer ran, and their targets, are
    counted."""

    def __init__(self, timeline: Timeline) -> None:
        self.first_step = 0
        self.step_number = 0
        self.first_loss: float | None = None
        self.loss: float | None = None
        self.first_validation_loss: float | None = None
        """Before the first step."""
        self.validation: HeldOutLoss | None = None
        self.validation_step = 0
        self.own_tokens = 0
        self.num_microbatches = 0
        self.num_rerouted = 0
        self.tokens_per_second = 0.0
        """Of the whole swarm, in the last step."""
        self.run_samples: int | None = None
        """None before the first step."""
        self._timeline = timeline
        self._sequence_length = timeline.config.data.sequence_length
        self._seconds = 0.0

    def begin(self, first_step: int) -> None:
        self.first_step = self.step_number = first_step

    def add(self, step: Step) -> None:
        totals, report = step.totals, step.report
        self.step_number = step.number
        if (loss := totals.loss) is not None:
            self.loss = loss
            self.first_loss = self.loss if self.first_loss is None else self.first_loss
        self.own_tokens += totals.num_targets
        self.num_microbatches += totals.num_microbatches
        self.num_rerouted += totals.num_rerouted
        self._seconds += step.seconds
        usual, before = self._timeline.at(step.number - 1).rounds.round_samples, self.run_samples
        if report:
            self.run_samples = report.run_samples
        else:
            self.run_samples = step.number * usual if before is None else before + usual
        # After a stage has come back from a checkpoint, the run has fewer samples than before.
        gained = usual if before is None else max(0, self.run_samples - before)
        self.tokens_per_second = gained * self._sequence_length / max(step.seconds, 1e-9)

    def evaluated(self, validation: HeldOutLoss) -> None:
        self.validation, self.validation_step = validation, self.step_number

    @property
    def validation_loss(self) -> float | None:
        """The loss that was computed last; None before the first."""
        return None if self.validation is None else self.validation.mean

    @property
    def total_tokens(self) -> int:
        return (self.run_samples or 0) * self._sequence_length

    def _validation(self) -> dict[str, Figure]:
        by_source = {} if self.validation is None else self.validation.by_source
        return {"validation_loss": self.validation_loss, "validation_losses": by_source}

    def evaluation(self) -> dict[str, Figure]:
        return {"step": self.step_number, **self._validation()}

    def summary(self, corpus: Corpus) -> dict[str, Figure]:
        """How the run began and ended, and what counting bigrams alone would reach."""
        return {
            "first_loss": self.first_loss,
            "final_loss": self.loss,
            "first_validation_loss": self.first_validation_loss,
            **self._validation(),
            # Counts of tokens mean something only for text, not for conversations.
            "unigram_entropy": unigram_entropy(corpus) if corpus.is_text else None,
            "bigram_entropy": bigram_entropy(corpus) if corpus.is_text else None,
            "tokens": self.own_tokens,
            "tokens_per_second": self.own_tokens / max(self._seconds, 1e-9),
            "microbatches_completed": self.num_microbatches,
            "microbatches_rerouted": self.num_rerouted,
            "steps": self.step_number - self.first_step,
        }


def unigram_entropy(corpus: Corpus) -> float:
    """Held-out cross entropy of token frequencies with add-one smoothing, in nats per token."""
    unigram = _unigram(_counts(corpus))
    return float(np.concatenate([-np.log(unigram[source.held_out]) for source in corpus.sources]).mean())


def bigram_entropy(corpus: Corpus) -> float:
    """Held-out cross entropy of each token given the one before it, in nats per token.

    The smoothing is like add-one, except that the vocab_size imaginary observations of each context are spread as the
    unigram spreads them, not evenly (the Dirichlet prior of MacKay and Peto 1995, with a fixed strength):

        p(b | a) = (count(ab) + vocab_size * p(b)) / (count(a) + vocab_size)

    So the figure is meaningful even if the vocabulary is large and most pairs were never seen. Only the pairs that
    occur in the held-out part are counted, so memory does not grow with the square of the vocabulary.
    """
    held_out = np.concatenate([_pairs(source.held_out, corpus.vocab_size) for source in corpus.sources])
    pairs, where = np.unique(held_out, return_inverse=True)
    pair_counts = np.zeros(len(pairs), dtype=np.int64)
    for chunk in _training_chunks(corpus):
        seen, times = np.unique(_pairs(chunk, corpus.vocab_size), return_counts=True)
        places = np.searchsorted(pairs, seen).clip(max=len(pairs) - 1)
        found = pairs[places] == seen
        pair_counts[places[found]] += times[found]
    contexts, following = np.divmod(pairs, corpus.vocab_size)
    counts = _counts(corpus)
    prior = corpus.vocab_size * _unigram(counts)[following]
    probabilities = (pair_counts + prior) / (counts[contexts] + corpus.vocab_size)
    return float(-np.log(probabilities)[where].mean())


def _counts(corpus: Corpus) -> npt.NDArray[np.int64]:
    """How often each token is followed by another in the training part [vocab_size]."""
    counts = np.zeros(corpus.vocab_size, dtype=np.int64)
    for chunk in _training_chunks(corpus):
        counts += np.bincount(chunk[:-1], minlength=corpus.vocab_size)
    return counts


def _unigram(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Smoothed probability of each token [vocab_size]."""
    probabilities: npt.NDArray[np.float64] = (counts + 1) / (counts.sum() + len(counts))
    return probabilities


def _pairs(tokens: TokenIds, vocab_size: int) -> npt.NDArray[np.int64]:
    """Each pair of neighbours as one number, first * vocab_size + second [num_tokens - 1]."""
    return tokens[:-1].astype(np.int64) * vocab_size + tokens[1:]


def _training_chunks(corpus: Corpus) -> Iterator[TokenIds]:
    """Yield pieces of each text. Each shares a token with the next, so that each pair of neighbours is in one piece."""
    for source in corpus.sources:
        for start in range(0, len(source.training) - 1, _CHUNK_TOKENS):
            yield source.training[start : start + _CHUNK_TOKENS + 1]
