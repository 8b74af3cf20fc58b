"""The bodies of answers, whole and as events of a stream."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

END_OF_STREAM = b"data: [DONE]\n\n"


def event(body: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens that an answer took."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def body(self) -> dict[str, int]:
        """As clients know it."""
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return counts | {"total_tokens": sum(counts.values())}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, whose text is told as a message of a conversation or as it is.

    Attributes:
        id: the answer's own.
        created: seconds since the epoch.
        model: the model that gives it.
        includes_usage: whether a stream is to end with the numbers of tokens.
    """

    is_chat: bool
    id: str
    created: int
    model: str
    includes_usage: bool = False

    def whole(self, text: str, finish_reason: str, usage: Usage) -> dict[str, Any]:
        """All of it at once."""
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._body(kind, [_choice(said, finish_reason)]) | {"usage": usage.body}

    def opening(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, None)] if self.is_chat else []

    def piece(self, text: str) -> dict[str, Any]:
        """A piece of text in a stream."""
        return self._chunk({"delta": {"content": text}} if self.is_chat else {"text": text}, None)

    def closing(self, finish_reason: str, usage: Usage) -> list[dict[str, Any]]:
        """What a stream ends with."""
        chunks = [self._chunk({"delta": {}} if self.is_chat else {"text": ""}, finish_reason)]
        if self.includes_usage:
            chunks.append(self._body(self._chunk_kind, []) | {"usage": usage.body})
        return chunks

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, said: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        body = self._body(self._chunk_kind, [_choice(said, finish_reason)])
        return body | {"usage": None} if self.includes_usage else body

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _choice(said: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}
