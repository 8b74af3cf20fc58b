"""A tokenizer.json of a few words."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace


def write_tokenizer(path: Path, words: Sequence[str]) -> str:
    """Write one that knows these words, and takes any other for `[UNK]`, which is 0; gives the path as an option."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return str(path)
