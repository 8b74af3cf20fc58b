"""Tokenizers: text to token ids and back.

data/prepared tokenizes datasets with them, and the programs decode what a model generates. A tokenizer is either the
bytes of UTF-8 or any tokenizer.json. No tokenizer adds tokens of its own to a text (no BOS, no padding).
"""

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from swarm.config import DataConfig
from swarm.data import tokenizer_files
from swarm.errors import CorpusMismatch, in_one_line

logger = logging.getLogger(__name__)

TokenIds = npt.NDArray[np.unsignedinteger[Any]]
"""Token ids, unsigned, as narrow as the vocabulary allows."""

_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The narrowest little-endian unsigned type that holds every id below `vocab_size`."""
    if vocab_size <= 2**8:
        return np.dtype("u1")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class ByteTokenizer:
    """Each byte of the UTF-8 text is a token. Documents end in a newline."""

    identity = "bytes"
    """Tokenizers with equal identities encode alike."""
    vocab_size = 256
    """One more than the largest id."""

    @property
    def separator(self) -> TokenIds:
        """The tokens that follow each text of a corpus."""
        return self.encode("\n")

    def encode(self, text: str) -> TokenIds:
        """Token ids [num_tokens] of `text`."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_parts(self, text: str, parts: Sequence[tuple[int, int]]) -> tuple[TokenIds, npt.NDArray[np.bool_]]:
        """The tokens, as `encode` gives them, and for each token whether it overlaps one of the parts.

        Args:
            parts: parts of the text, as characters [first, last), in order.
        """
        ids = self.encode(text)
        is_in_part = np.zeros(len(ids), dtype=bool)
        for first, last in parts:
            start = len(text[:first].encode())
            is_in_part[start : start + len(text[first:last].encode())] = True
        return ids, is_in_part

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
        """The text of `ids`; ids that the tokenizer doesn't know are left out."""
        known = np.asarray(ids, dtype=np.int64)
        return known[known < self.vocab_size].astype(np.uint8).tobytes().decode(errors="replace")


class JsonTokenizer:
    """A tokenizer.json, in the format of the `tokenizers` library. It has all that ByteTokenizer has.

    Its identity is the SHA-256 of the tokenizer.json. `encode` and `encode_parts` raise ValueError for a text that it
    cannot encode.

    Documents end in the end-of-text token if the vocabulary has one by a usual name, else in an encoded newline.
    """

    def __init__(self, definition: str) -> None:
        """Build from the text of a tokenizer.json.

        Raises:
            ValueError: the vocabulary is empty.
            Exception: what the library raises for an invalid tokenizer.json.
        """
        self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.identity = hashlib.sha256(definition.encode()).hexdigest()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError("its vocabulary is empty")
        # This may be more than the number of entries, because a vocabulary may leave ids out.
        self.vocab_size = 1 + max(vocabulary.values())
        self._dtype = token_dtype(self.vocab_size)

    @property
    def separator(self) -> TokenIds:
        ids = (self._tokenizer.token_to_id(name) for name in _END_OF_TEXT)
        known = [token for token in ids if token is not None]
        return np.array(known[:1], dtype=self._dtype) if known else self.encode("\n")

    def encode(self, text: str) -> TokenIds:
        return np.array(self._encoding(text).ids, dtype=self._dtype)

    def encode_parts(self, text: str, parts: Sequence[tuple[int, int]]) -> tuple[TokenIds, npt.NDArray[np.bool_]]:
        encoding = self._encoding(text)
        ids = np.array(encoding.ids, dtype=self._dtype)
        firsts, lasts = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        is_in_part = np.zeros(len(ids), dtype=bool)
        for first, last in parts:
            is_in_part |= (firsts < last) & (lasts > first)
        return ids, is_in_part

    def _encoding(self, text: str) -> tokenizers.Encoding:
        # A batch would be faster on many cores. But it uses the library's threads, after which the library complains
        # whenever a child process starts, so peers/shared/process.py switches them off.
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            reason = in_one_line(error)
            raise ValueError(f"the tokenizer {self.identity[:12]} cannot encode the text: {reason}") from None

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))


Tokenizer = ByteTokenizer | JsonTokenizer


def load(spec: str) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` names: `bytes`, or a tokenizer.json by its path, its folder, or a hub
    name.

    Raises:
        ValueError: one line, if the file is missing, unreadable or no tokenizer.
        PeerUnavailable: it cannot be downloaded from the hub.
    """
    if spec == ByteTokenizer.identity:
        return ByteTokenizer()
    if spec == tokenizer_files.SERVED:
        raise ValueError("the run's tokenizer is not on this machine: name a copy with --tokenizer")
    try:
        definition = tokenizer_files.located(spec).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(
            f"cannot read data.tokenizer {spec!r}: {reason}; give --tokenizer 'bytes', a folder with a tokenizer.json, "
            "the path of one, or the name of a model on the hub"
        ) from None
    try:
        return JsonTokenizer(definition)
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        reason = in_one_line(error)
        raise ValueError(f"data.tokenizer {spec!r} is not a valid tokenizer.json: {reason}") from None


def load_for_run(data: DataConfig, *, vocab_size: int) -> Tokenizer:
    """Load the tokenizer that `data` names on this machine, and check that it fits the run and the model.

    Log a warning if the model has so many more tokens that it must be meant for another tokenizer.

    Args:
        vocab_size: the model's.

    Raises:
        CorpusMismatch: it is another tokenizer than the run's.
        ValueError: one line, if it cannot be read, or has more tokens than the model.
    """
    tokenizer = load(data.tokenizer)
    if data.tokenizer_identity not in ("", tokenizer.identity):
        raise CorpusMismatch(
            f"data.tokenizer {data.tokenizer!r} is another tokenizer here ({tokenizer.identity[:12]}) than in the run "
            f"({data.tokenizer_identity[:12]}); leave --tokenizer out: the run's peers have the right one"
        )
    _check_vocabulary(tokenizer, vocab_size)
    return tokenizer


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    if tokenizer.identity == ByteTokenizer.identity and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"text is read as bytes, for which model.vocab_size ({vocab_size}) is too small: name the model's "
            f"tokenizer with --tokenizer, or set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"model.vocab_size ({vocab_size}) is smaller than the tokenizer's ({tokenizer.vocab_size}); "
            f"set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    if vocab_size > 4 * tokenizer.vocab_size:
        logger.warning(
            "model.vocab_size is %d, and the tokenizer has %d tokens: most of the embedding will never be used; name "
            "the right one in data.tokenizer",
            vocab_size,
            tokenizer.vocab_size,
        )
