"""Tokenizers: text to token ids and back.

A tokenizer is the bytes of UTF-8, or any tokenizer.json with what the tokenizer_config.json beside it adds, as
transformers reads both, or a class of the user's own.
"""

import hashlib
import json
import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from swarm.config import DataConfig, ModelConfig
from swarm.config.data import CLASS, Format
from swarm.data import tokenizer_files
from swarm.data.own_tokenizer import OwnTokenizer
from swarm.data.tokenizer_files import token_text
from swarm.errors import CorpusMismatch, in_one_line
from swarm.machine import json_file
from swarm.training.samples import TokenIds, token_dtype

logger = logging.getLogger(__name__)

_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100))
BYTES_OF_LETTERS = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
"""The byte for each letter in which GPT-2's tokenizer, and all that are made like it, write bytes: a printable byte of
Latin-1 is written as itself, and the others, in their order, as the characters from 256 on."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token of one byte in tokenizers that are made like sentencepiece's."""


class ByteTokenizer:
    """Each byte of the UTF-8 text is a token. Documents end in a newline."""

    end: int | None = None
    """The special token that ends a text; None if there is none."""
    prefix: TokenIds = np.zeros(0, dtype=np.uint8)
    """The tokens with which a text begins, such as BOS. A conversation has them where its template writes them."""
    identity = "bytes"
    """Tokenizers with equal identities encode alike."""
    vocab_size = 256
    """One more than the largest id."""

    @property
    def separator(self) -> TokenIds:
        """The tokens that follow each text of a corpus."""
        return self.encode("\n")

    def encode(self, text: str) -> TokenIds:
        """Token ids [num_tokens] of `text`, without the prefix."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_parts(self, text: str, parts: Sequence[tuple[int, int]]) -> tuple[TokenIds, npt.NDArray[np.bool_]]:
        """The tokens, as `encode` gives them, and for each token whether it overlaps one of the parts. `parts` are
        parts of the text, as characters [first, last), in order."""
        ids = self.encode(text)
        is_in_part = np.zeros(len(ids), dtype=bool)
        for first, last in parts:
            start = len(text[:first].encode())
            is_in_part[start : start + len(text[first:last].encode())] = True
        return ids, is_in_part

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]], *, with_special: bool = True) -> str:
        """The text of `ids`; ids that the tokenizer doesn't know are left out. `with_special` says whether special
        tokens, such as the end of a turn, are part of the text."""
        known = np.asarray(ids, dtype=np.int64)
        return known[known < self.vocab_size].astype(np.uint8).tobytes().decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to a text, which may be a part of a character; empty if the tokenizer doesn't know it."""
        return bytes([token]) if token < self.vocab_size else b""


class JsonTokenizer:
    """A tokenizer.json, in the format of the `tokenizers` library. It has all that ByteTokenizer has.

    Its identity is the SHA-256 of the tokenizer.json, and of what tokenizer_config.json adds. `encode` and
    `encode_parts` raise ValueError for a text that it cannot encode.

    Documents end in the `eos_token` of tokenizer_config.json, or in the end-of-text token if the vocabulary has one by
    a usual name, else in an encoded newline. They begin with what the tokenizer's post-processor puts before a text.
    """

    def __init__(self, definition: str, about: Mapping[str, Any] | None = None) -> None:
        """Build from the text of a tokenizer.json.

        Args:
            about: the tokenizer_config.json beside it.

        Raises:
            ValueError: the vocabulary is empty, or tokenizer_config.json does not fit it.
            Exception: what the library raises for an invalid tokenizer.json.
        """
        self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._add_special_tokens(about or {})
        extra = json.dumps(added) if added else ""
        self.identity = hashlib.sha256((definition + extra).encode()).hexdigest()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError("its vocabulary is empty")
        # This may be more than the number of entries, because a vocabulary may leave ids out.
        self.vocab_size = 1 + max(vocabulary.values())
        self._dtype = token_dtype(self.vocab_size)
        names = (token_text((about or {}).get("eos_token")) or "", *_END_OF_TEXT)
        ids = (self._tokenizer.token_to_id(name) for name in names)
        self.end = next((token for token in ids if token is not None), None)
        self.prefix = self._find_prefix()

    def _add_special_tokens(self, about: Mapping[str, Any]) -> list[str]:
        """Add the tokens that tokenizer_config.json names and the tokenizer lacks, as transformers does, and return
        them. The padding token is left out, because no text has it, and many models have no row for it."""
        numbered = about.get("added_tokens_decoder") or {}
        others = about.get("additional_special_tokens") or []
        if not isinstance(numbered, dict) or not isinstance(others, list):
            raise ValueError("tokenizer_config.json names added tokens in no form that is known")
        entries: list[tuple[int | None, Any]] = []
        for number, entry in sorted(numbered.items(), key=lambda item: int(item[0]) if item[0].isdecimal() else -1):
            entries.append((int(number) if number.isdecimal() else None, entry))
        entries += [(None, entry) for entry in (about.get("bos_token"), about.get("eos_token"), *others)]
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        added = list[str]()
        for wanted, entry in entries:
            content = token_text(entry)
            if not content or content in known or content == token_text(about.get("pad_token")):
                continue
            options = entry if isinstance(entry, dict) else {}
            flags = {name: bool(options.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            token = tokenizers.AddedToken(content, special=bool(options.get("special", True)), **flags)
            add = self._tokenizer.add_special_tokens if token.special else self._tokenizer.add_tokens
            add([token])
            known.add(content)
            added.append(content)
            if wanted is not None and self._tokenizer.token_to_id(content) != wanted:
                raise ValueError(
                    f"tokenizer_config.json gives {content!r} the number {wanted}, and in tokenizer.json it would be "
                    f"{self._tokenizer.token_to_id(content)}: save the tokenizer anew with transformers"
                )
        return added

    def _find_prefix(self) -> TokenIds:
        try:
            bare = self._tokenizer.encode("a", add_special_tokens=False).ids
            whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        except Exception:  # noqa: BLE001 - the library raises nothing narrower for a text that has no tokens
            bare = whole = []
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return np.array(whole[:start], dtype=self._dtype)
        return np.zeros(0, dtype=self._dtype)

    @property
    def separator(self) -> TokenIds:
        return self.encode("\n") if self.end is None else np.array([self.end], dtype=self._dtype)

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

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]], *, with_special: bool = True) -> str:
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=not with_special))

    def bytes_of(self, token: int) -> bytes:
        # Many decoders leave out the space before the first word.
        text = self.decode([token, token]).removeprefix(self.decode([token]))
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        written = self._tokenizer.id_to_token(token) or ""
        if found := _BYTE.fullmatch(written):
            return bytes.fromhex(found[1])
        if all(letter in BYTES_OF_LETTERS for letter in written):
            return bytes(BYTES_OF_LETTERS[letter] for letter in written)
        return written.encode()


Tokenizer = ByteTokenizer | JsonTokenizer | OwnTokenizer


def load(spec: str) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` names: `bytes`, a tokenizer.json by its path, its folder, or a hub name,
    or a class, which is imported: a name that others give goes through `trusted` first. Raises ValueError, of one line,
    if the file or class is missing, unreadable or no tokenizer, and PeerUnavailable if it cannot be downloaded from the
    hub."""
    if spec == ByteTokenizer.identity:
        return ByteTokenizer()
    if spec.startswith(CLASS):
        return OwnTokenizer(spec)
    if spec == tokenizer_files.SERVED:
        raise ValueError("the run's tokenizer is not on this machine: name a copy with --tokenizer")
    try:
        path = tokenizer_files.located(spec)
        tokenizer_files.require_json(path)
        definition = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(
            f"cannot read data.tokenizer {spec!r}: {reason}; give --tokenizer 'bytes', a folder with a tokenizer.json, "
            "the path of one, or the name of a model on the hub"
        ) from None
    about = json_file.read_object(path.parent / "tokenizer_config.json", is_optional=True)
    try:
        return JsonTokenizer(definition, about)
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
        advice = "leave --tokenizer out: the run's peers have the right one"
        if not data.tokenizer_files and data.tokenizer_identity != ByteTokenizer.identity:
            advice = "the class has to do here what it does on the run's other machines"
        raise CorpusMismatch(
            f"data.tokenizer {data.tokenizer!r} is another tokenizer here ({tokenizer.identity[:12]}) than in the run "
            f"({data.tokenizer_identity[:12]}); {advice}"
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


def end_tokens(
    model: ModelConfig, folders: Sequence[Path], tokenizer: Tokenizer, *, format: Format = "text"
) -> frozenset[int]:
    """The end tokens that files and configuration name, by number or as the tokenizer's `eos_token`, and the one that
    ends what the run learns; may be empty.

    Args:
        model: the model's configuration. Its eos_token_ids count only if no generation_config.json names any.
        folders: of the tokenizer and the model, as transformers writes them.
        format: of the run's text. A completion ends in a newline, where the tokenizer has no end token.

    Raises:
        ValueError: one line, if a file is no JSON, or names something that is no token.
    """
    numbers, named = set[int](), set[int]()
    for folder in folders:
        path = folder / "generation_config.json"
        ends = json_file.read_object(path, is_optional=True).get("eos_token_id")
        numbers.update(token_numbers(ends, f"{path}: eos_token_id"))
        about = json_file.read_object(folder / "tokenizer_config.json", is_optional=True)
        if (token := token_text(about.get("eos_token"))) and len(ids := tokenizer.encode(token)) == 1:
            named.update(ids.tolist())
    if tokenizer.end is not None:
        named.add(tokenizer.end)
    elif format == "completion" and len(tokenizer.separator) == 1:
        named.update(tokenizer.separator.tolist())
    return frozenset((numbers or set(model.eos_token_ids)) | named)


def token_numbers(value: Any, what: str) -> tuple[int, ...]:
    """The tokens that a value names: a number is one token, a list several, and None (null) none. `what` says where the
    value stands, for the message. Raises ValueError if it is anything else."""
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise ValueError(f"{what} is {reprlib.repr(value)}, and should be a token's number, or a list of such")
    return tuple(tokens)
