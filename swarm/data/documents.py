"""Documents: conversations and completions as tokens, of which only some are targets.

Used by data/prepared. Targets are the tokens that the assistant says in a conversation, or that follow the prompt of a
completion, with the token that ends it. Documents with more tokens than a sequence are cut or dropped, and those
without a target left are dropped. All of them are counted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from swarm.config import DataConfig
from swarm.config.data import Format
from swarm.data.chat import ChatTemplate
from swarm.data.rows import Row
from swarm.data.tokenizers import TokenIds, Tokenizer


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
    counts: Counts = field(default_factory=Counts)

    def of(self, rows: Iterator[Row]) -> Iterator[Document]:
        """Yield the rows' documents that have targets. Raises ValueError, one line that names the row at fault."""
        longest = self.config.sequence_length + 1
        for row in rows:
            document = self._of_row(row)
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
        try:
            match self.config.format:
                case "chat":
                    document = self._conversation(row)
                case "completion":
                    document = self._completion(row)
                case "text":
                    raise AssertionError("texts are not cut into documents")
                case other:
                    assert_never(other)
        except ValueError as error:
            reason = str(error)
            raise row.fault(reason.removeprefix(f"{row.place}: ")) from None
        if len(document):
            document.targets[0] = False
        return document

    def _conversation(self, row: Row) -> Document:
        assert self.template is not None, "conversations are read with a template"
        rendered = self.template.render_training(_messages(row))
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
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no 'role'")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"message {number} has no text in 'content'")
    return messages
