"""Entropies of a corpus: the loss, in nats per token, of a model that only counts tokens or pairs of tokens.

A trainer's summary compares the model's held-out loss with them: below the bigram entropy the model has learnt more
than which token follows which. Counts come from the training part, and the cross entropy from the held-out part. The
corpus is read in chunks.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from swarm.data.corpora import Corpus
from swarm.training.samples import TokenIds

_CHUNK_TOKENS = 2**20


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
