import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from peers.trainer import figures
from peers.trainer.figures import bigram_entropy, unigram_entropy
from swarm.data.corpora import Corpus
from tests.support.text_corpus import text_corpus


def _corpus(tokens: list[int], *, training: int, vocab_size: int) -> Corpus:
    return text_corpus((np.array(tokens, dtype=np.uint16), training), vocab_size=vocab_size)


def _random(num_tokens: int, vocab_size: int) -> list[int]:
    weights = np.arange(1, vocab_size + 1) / sum(range(1, vocab_size + 1))
    return [int(token) for token in np.random.default_rng(0).choice(vocab_size, num_tokens, p=weights)]


@pytest.mark.parametrize("chunk", [1, 7, 2**20])
def test_against_plain_counting(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Entropies follow the formulas of the docstrings, one token at a time, however the corpus is cut into chunks."""
    monkeypatch.setattr(figures, "_CHUNK_TOKENS", chunk)
    vocab_size, training = 11, 300
    tokens = _random(400, vocab_size)
    corpus = _corpus(tokens, training=training, vocab_size=vocab_size)
    fitted, held_out = tokens[:training], tokens[training:]

    singles, pairs = Counter(fitted[:-1]), Counter(pairwise(fitted))
    unigram = {token: (singles[token] + 1) / (training - 1 + vocab_size) for token in range(vocab_size)}
    expected = [-math.log(unigram[token]) for token in held_out]
    assert unigram_entropy(corpus) == pytest.approx(sum(expected) / len(expected))

    expected = [
        -math.log((pairs[a, b] + vocab_size * unigram[b]) / (singles[a] + vocab_size)) for a, b in pairwise(held_out)
    ]
    assert bigram_entropy(corpus) == pytest.approx(sum(expected) / len(expected))


def test_neighbours_of_two_texts_are_no_pair() -> None:
    """Counts and means are of all texts, but the first text's end and the second's beginning form no pair."""
    texts = [np.array(tokens, dtype=np.uint16) for tokens in ([0, 1] * 500, [2, 3] * 200)]
    corpus = text_corpus(*((text, len(text) - 100) for text in texts), vocab_size=4)
    # How often each token is followed by another one, plus 1.
    unigram = np.array([451, 450, 151, 150]) / 1202
    assert unigram_entropy(corpus) == pytest.approx(-np.log(unigram).mean())
    assert bigram_entropy(corpus) < 0.02
