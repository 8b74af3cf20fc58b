"""Documents: conversations and completions as tokens, of which some are targets, and their packing into sequences.

Targets are the tokens that the assistant says in a conversation, or that follow the prompt of a completion, with the
token that ends it. Conversations are read as datasets publish them: with tools, messages that are not to be learnt,
texts in parts, and fields that are null. All that is cut or dropped is counted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from swarm.config import DataConfig
from swarm.config.data import Format
from swarm.data.chat import ChatTemplate
from swarm.data.rows import Faults, Row
from swarm.data.tokenizers import Tokenizer
from swarm.machine import json_file
from swarm.training import samples
from swarm.training.samples import DOCUMENTS, TARGETS, TOKENS, TokenIds, token_dtype

VERSION = 5
"""Raise it with every change, here or in prepared.py, of the tokens or sequences that the same dataset becomes: it is
part of the key of what is prepared, so that nobody takes what an earlier release has in the cache."""
NUM_OPEN = 64
"""The most sequences that are open because they still have room. With this many, hardly any room is left empty."""
_RECORDS_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class Document:
    """One document. `targets`, bool [num_tokens], says which tokens are to be predicted; the first one never is."""

    tokens: TokenIds
    targets: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)


def noun_of(format: Format) -> str:
    """What a document of this format is called, in the singular."""
    match format:
        case "text":
            return "text"
        case "chat":
            return "conversation"
        case "completion":
            return "completion"
        case other:
            assert_never(other)


@dataclass
class Counts:
    taken: int = 0
    cut: int = 0
    dropped: int = 0
    """Rows that were dropped because they were too long."""
    without_target: int = 0


@dataclass
class Documents:
    config: DataConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """The template for conversations."""
    faults: Faults = field(default_factory=Faults)
    """Leaves out rows of which no document can be made."""
    counts: Counts = field(default_factory=Counts)

    def of(self, rows: Iterator[Row]) -> Iterator[Document]:
        """Yield the rows' documents that have targets. Raises ValueError as `Faults.each` does."""
        longest = self.config.sequence_length + 1
        for document in self.faults.each(rows, self._of_row):
            if len(document) > longest:
                if self.config.too_long == "drop":
                    self.counts.dropped += 1
                    continue
                document = Document(document.tokens[:longest], document.targets[:longest])
                self.counts.cut += bool(document.targets.any())
            if document.targets.any():
                self.counts.taken += 1
                yield document
            else:
                self.counts.without_target += 1

    def _of_row(self, row: Row) -> Document:
        match self.config.format:
            case "chat":
                document = self._conversation(row)
            case "completion":
                document = self._completion(row)
            case "text":
                raise AssertionError("texts are not cut into documents")
            case other:
                assert_never(other)
        if len(document):
            document.targets[0] = False
        return document

    def _conversation(self, row: Row) -> Document:
        assert self.template is not None, "conversations are read with a template"
        messages = _messages(row)
        unlearnt = [number for number, message in enumerate(messages) if not _is_learnt(number, message)]
        # The weight is meant for who trains, and no template knows it.
        shown = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
        rendered = self.template.render_training(shown, tools=_tools(row), unlearnt=unlearnt)
        return Document(*self.tokenizer.encode_parts(rendered.text, rendered.spans))

    def _completion(self, row: Row) -> Document:
        prompt, completion = row.text("prompt"), row.text("completion")
        text = prompt + completion
        tokens, targets = self.tokenizer.encode_parts(text, [(len(prompt), len(text))])
        begin, end = self.tokenizer.prefix, self.tokenizer.separator
        parts = np.zeros(len(begin), dtype=bool), targets, np.ones(len(end), dtype=bool)
        return Document(np.concatenate([begin, tokens, end]), np.concatenate(parts))


def _messages(row: Row) -> list[Mapping[str, Any]]:
    messages = row.values.get("messages")
    if not isinstance(messages, list):
        raise ValueError(f"there are no 'messages'; the row has {', '.join(row.values) or 'no fields'}")
    return [_message(number, message) for number, message in enumerate(messages, start=1)]


def _message(number: int, message: Any) -> Mapping[str, Any]:
    """The message as templates expect it: without empty fields, and with one text in `content`. That is None in a
    message that only calls tools, and templates ask whether it is."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} has no 'role'")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(f"message {number} has a part in 'content' that is no text: {kind!r}")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise ValueError(f"message {number} has no text in 'content'")
    return {name: value for name, value in message.items() if value is not None} | {"content": content}


def _is_learnt(index: int, message: Mapping[str, Any]) -> bool:
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"message {index + 1} has the weight {weight!r}, and weights are 0 (not learnt) or 1")
    return bool(weight)


def _tools(row: Row) -> list[Any] | None:
    """The tools that the row describes to the assistant. A table often has each, or all of them, as JSON."""
    tools = row.values.get("tools")
    try:
        tools = json_file.parse(tools) if isinstance(tools, str) and tools else tools
        tools = [json_file.parse(tool) if isinstance(tool, str) else tool for tool in tools or []]
    except (TypeError, ValueError) as error:
        raise ValueError(f"its 'tools' cannot be read: {error}") from None
    if not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("its 'tools' are no list of objects")
    return tools or None


def record_dtype(config: DataConfig, vocab_size: int) -> np.dtype[np.void]:
    """One sequence: the fields of training/samples, each [sequence_length + 1]."""
    shape = (config.sequence_length + 1,)
    types = {
        TOKENS: token_dtype(vocab_size),
        TARGETS: np.dtype("u1"),
        DOCUMENTS: token_dtype(config.sequence_length + 2),
    }
    return np.dtype([(name, types[name], shape) for name in samples.names(config)])


def sequences(documents: Iterator[Document], config: DataConfig, vocab_size: int) -> Iterator[npt.NDArray[np.void]]:
    """Yield sequences, as records of shape (). Each ends with padding, which counts as a document without targets."""
    dtype = record_dtype(config, vocab_size)
    if not config.is_packed:
        for document in documents:
            yield _record([document], dtype)
        return
    for group in pack(documents, config.sequence_length + 1):
        yield _record(group, dtype)


def pack(documents: Iterator[Document], capacity: int) -> Iterator[list[Document]]:
    """Yield groups of documents of at most `capacity` tokens. Each document goes into the fullest open group with room
    for it.

    This is best fit with a bounded number of bins (Johnson 1974): if too many are open, the fullest is closed.
    """
    groups: list[list[Document]] = []
    rooms: list[int] = []
    for document in documents:
        fitting = [index for index, room in enumerate(rooms) if room >= len(document)]
        if fitting:
            index = min(fitting, key=rooms.__getitem__)
        else:
            index = len(groups)
            groups.append([])
            rooms.append(capacity)
        groups[index].append(document)
        rooms[index] -= len(document)
        if rooms[index] == 0 or len(groups) > NUM_OPEN:
            fullest = min(range(len(rooms)), key=rooms.__getitem__)
            rooms.pop(fullest)
            yield groups.pop(fullest)
    yield from groups


def longest_learnt(records: npt.NDArray[np.void]) -> int:
    """The least sequence_length with which every document of some records is learnt whole."""
    longest = 0
    for start in range(0, len(records), _RECORDS_AT_ONCE):
        some = records[start : start + _RECORDS_AT_ONCE]
        places_BT = np.broadcast_to(np.arange(some[TARGETS].shape[1]), some[TARGETS].shape)
        if DOCUMENTS in (records.dtype.names or ()):
            begins_BT = np.diff(some[DOCUMENTS].astype(np.int64), axis=1, prepend=-1) != 0
            places_BT = places_BT - np.maximum.accumulate(np.where(begins_BT, places_BT, 0), axis=1)
        longest = max(longest, int(np.max(places_BT * some[TARGETS])))
    return longest


def _record(documents: list[Document], dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    record, names = np.zeros((), dtype=dtype), dtype.names or ()
    start = 0
    for number, document in enumerate(documents):
        end = start + len(document)
        record[TOKENS][start:end] = document.tokens
        record[TARGETS][start:end] = document.targets
        if DOCUMENTS in names:
            record[DOCUMENTS][start:end] = number
        start = end
    if DOCUMENTS in names:
        record[DOCUMENTS][start:] = len(documents)
    return record
