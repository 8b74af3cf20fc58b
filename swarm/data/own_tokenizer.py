"""A tokenizer that a class of the user's own gives, and who may have it imported.

data/tokenizers makes it where `data.tokenizer` names one. The programs ask `trusted` before they load a tokenizer that
a run or a checkpoint names, because a class is code that runs on this machine.
"""

import hashlib
import json
import shlex
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.config.data import CLASS
from swarm.errors import in_one_line
from swarm.machine.extras import own_class
from swarm.training.samples import TokenIds, token_dtype

_PROBE = "Some bees' 2,000 hives weren't  found:\n\n\tif x == 1: hören — 蜂\n"
"""A text by which tokenizers are told apart."""


def trusted(named: str | None, other: str) -> str:
    """The tokenizer that our user names, or else the one that a run or a checkpoint names. Raises ValueError if that
    one is a class, and our user has not named it."""
    if named is None and other.startswith(CLASS):
        raise ValueError(
            f"this run would have this machine import and run {other!r} as its tokenizer: if you trust that code, add "
            f"--tokenizer {shlex.quote(other)}"
        )
    return named or other


class OwnTokenizer:
    """A class of the user's own, made without arguments. It has all that ByteTokenizer has.

    The class has `encode(text)`, `decode(tokens)` and `vocab_size`, and may have `end` and `prefix`. Its identity is a
    SHA-256 of what it makes of each token, of these texts, and of one more. Whatever it does wrong raises ValueError,
    one line.
    """

    def __init__(self, name: str) -> None:
        """Import and make `class:package.module:Class`, which our user has to have named."""
        self._name = name
        found: Any = own_class("data.tokenizer", name.removeprefix(CLASS))
        self._own: Any = self._asked("its constructor", found)
        if not all(hasattr(self._own, member) for member in ("encode", "decode", "vocab_size")):
            raise ValueError(f"data.tokenizer {name!r} is not a class with encode, decode and vocab_size")
        self.vocab_size = int(self._own.vocab_size)
        self._dtype = token_dtype(self.vocab_size)
        self.prefix = self._tokens("prefix", getattr(self._own, "prefix", ()))
        end = getattr(self._own, "end", None)
        self.end = None if end is None else int(self._tokens("end", [end])[0])
        texts = [self.decode([token]) for token in range(self.vocab_size)]
        does = [self.vocab_size, self.end, self.prefix.tolist(), texts, *map(self._encoded, (*texts, _PROBE))]
        self.identity = hashlib.sha256(json.dumps(does).encode()).hexdigest()

    def _asked(self, what: str, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            reason = f"{type(error).__name__}: {in_one_line(error)}"
            raise ValueError(f"data.tokenizer {self._name!r} fails in {what}: {reason}") from error

    def _tokens(self, what: str, given: Any) -> TokenIds:
        tokens = self._asked(what, lambda: np.array([int(token) for token in given], dtype=np.int64))
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise ValueError(f"data.tokenizer {self._name!r} has a token in {what} that is not below its vocab_size")
        return np.asarray(tokens, dtype=self._dtype)

    def _encoded(self, text: str) -> list[int] | None:
        """The tokens of a text; None if the class knows none for it."""
        try:
            tokens: list[int] = self.encode(text).tolist()
        except ValueError:
            return None
        return tokens

    @property
    def separator(self) -> TokenIds:
        return self.encode("\n") if self.end is None else np.array([self.end], dtype=self._dtype)

    def encode(self, text: str) -> TokenIds:
        return self._tokens("encode", self._asked("encode", self._own.encode, text))

    def encode_parts(self, text: str, parts: Sequence[tuple[int, int]]) -> tuple[TokenIds, npt.NDArray[np.bool_]]:
        # No token reaches from a part into its neighbour: each is encoded by itself.
        cuts = pairwise([0, *chain.from_iterable(parts), len(text)])
        pieces = [self.encode(text[first:last]) for first, last in cuts]
        is_in_part = [np.full(len(piece), bool(number % 2)) for number, piece in enumerate(pieces)]
        return np.concatenate(pieces), np.concatenate(is_in_part)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]], *, with_special: bool = True) -> str:
        special = () if with_special else (self.end, *self.prefix.tolist())
        known = [int(token) for token in ids if token < self.vocab_size and token not in special]
        return str(self._asked("decode", self._own.decode, known))

    def bytes_of(self, token: int) -> bytes:
        return self.decode([token, token]).removeprefix(self.decode([token])).encode()
