"""Makes the bodies of answers, whole and as events of a stream."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

END_OF_STREAM = b"data: [DONE]\n\n"
STILL_HERE = b": the text goes on\n\n"
"""A comment in a stream, which clients skip: it shows that the connection lives."""


def event(body: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The numbers of tokens of a prompt and its answer."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def body(self) -> dict[str, int]:
        """The numbers under OpenAI's names."""
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return counts | {"total_tokens": sum(counts.values())}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer with its texts, in the form of a conversation's messages or of completions.

    Attributes:
        is_chat: whether it is a conversation's message.
        id: the answer's own id.
        created: when the answer was made, in seconds since the epoch.
        model: the name of the model that gives it.
        includes_usage: whether a stream ends with the numbers of tokens.
    """

    is_chat: bool
    id: str
    created: int
    model: str
    includes_usage: bool = False

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """The body of the whole answer."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._body(kind, choices) | {"usage": usage.body}

    def choice(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        """One text of the whole answer."""
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
        return _choice(index, said, finish_reason)

    def opening(self, num_texts: int) -> list[dict[str, Any]]:
        """The events with which a stream begins."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(index, said, None) for index in range(num_texts)] if self.is_chat else []

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """The event with a piece of a text in a stream."""
        return self._chunk(index, {"delta": {"content": text}} if self.is_chat else {"text": text}, None)

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The event that ends a text in a stream."""
        return self._chunk(index, {"delta": {}} if self.is_chat else {"text": ""}, finish_reason)

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """The events with which a stream ends."""
        return [self._body(self._chunk_kind, []) | {"usage": usage.body}] if self.includes_usage else []

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, index: int, said: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        body = self._body(self._chunk_kind, [_choice(index, said, finish_reason)])
        return body | {"usage": None} if self.includes_usage else body

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _choice(index: int, said: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, **said, "logprobs": None, "finish_reason": finish_reason}
