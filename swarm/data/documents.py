"""Documents: conversations and completions as tokens, of which only some are targets.

Used by data/prepared. Targets are the tokens that the assistant says in a conversation, or that follow the prompt of a
completion, with the token that ends it. Documents with more tokens than a sequence are cut or dropped, and those
without a target left are dropped. All of them are counted. Conversations are read as datasets publish them: with tools,
messages that are not to be learnt, texts in parts, and fields that are null.
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
from swarm.training.samples import TokenIds


@dataclass(frozen=True, eq=False)
class Document:
    """One document.

    Attributes:
        targets: bool [num_tokens], which tokens are to be predicted; the first one never is.
    """

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
    """How many rows were taken, cut and dropped."""

    taken: int = 0
    cut: int = 0
    dropped: int = 0
    """Rows that were dropped because they were too long."""
    without_target: int = 0


@dataclass
class Documents:
    """Makes documents of rows."""

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
