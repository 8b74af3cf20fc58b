"""Makes the bodies of answers, whole and as events of a stream."""

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
    """One answer, in the form of a conversation's message or of a completion.

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

    def whole(self, text: str, finish_reason: str, usage: Usage) -> dict[str, Any]:
        """The body of the whole answer."""
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._body(kind, [_choice(said, finish_reason)]) | {"usage": usage.body}

    def opening(self) -> list[dict[str, Any]]:
        """The events with which a stream begins."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, None)] if self.is_chat else []

    def piece(self, text: str) -> dict[str, Any]:
        """The event with a piece of text in a stream."""
        return self._chunk({"delta": {"content": text}} if self.is_chat else {"text": text}, None)

    def closing(self, finish_reason: str, usage: Usage) -> list[dict[str, Any]]:
        """The events with which a stream ends."""
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
