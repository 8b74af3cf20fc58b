"""Corpora of given tokens."""

from swarm.data.corpora import Corpus, SourceTokens
from swarm.training.samples import TokenIds


def text_corpus(*sources: tuple[TokenIds, int], vocab_size: int) -> Corpus:
    """A corpus of texts, each given by its tokens and how many of them are trained on."""
    found = [SourceTokens(tokens=own, num_training=num, held_out=own[num:], digest="") for own, num in sources]
    return Corpus(sources=found, vocab_size=vocab_size, digest="", tokenizer_identity="")
