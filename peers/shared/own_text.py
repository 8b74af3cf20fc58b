"""Prepares the text of a run that this process begins, and names it in the run's configuration.

Used by swarm-peer and swarm-static. Nothing is fetched from peers.
"""

import dataclasses
from pathlib import Path

from peers.shared.environment import kept_tokenizer
from swarm.config import RunConfig, TextSize
from swarm.data import corpora, tokenizer_files, tokenizers
from swarm.data.corpora import Corpus


def text_size(config: RunConfig, cache: Path) -> TextSize:
    """How much text a run has, which leaves sizes out. Blocks while the text is prepared.

    Raises:
        ValueError: there is no such text or tokenizer.
    """
    tokenizers.load_for_run(config.data, vocab_size=config.model.vocab_size)
    # As if there were plenty of text. Documents are packed into such samples as they are prepared.
    return corpora.size(config.begun().data, cache_dir=cache / "corpora")


def with_text(config: RunConfig, cache: Path) -> tuple[RunConfig, Corpus]:
    """The configuration with the digests of text and tokenizer, and the text. Blocks while the text is prepared.

    Raises:
        ValueError: there is no such text or tokenizer.
        CorpusMismatch: the configuration has the digest of another text.
    """
    tokenizers.load_for_run(config.data, vocab_size=config.model.vocab_size)
    corpus = corpora.prepare(config.data, cache_dir=cache / "corpora")
    corpora.check_digest(config.data, corpus)
    files = None
    if tokenizer_files.has_files(config.data.tokenizer):
        files = tokenizer_files.read(tokenizer_files.located(config.data.tokenizer))
        # A peer gives the tokenizer to others from this folder.
        files.keep(kept_tokenizer(cache, files.digest))
    return dataclasses.replace(config, data=corpora.published(config.data, corpus, files)), corpus
