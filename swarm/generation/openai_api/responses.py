"""OpenAI's /v1/responses, text in and text out: what it asks, and the bodies of its answers.

A response is an answer in a conversation, in another form. Nothing is kept: the client sends the whole conversation.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from swarm.generation.openai_api.answers import Refusal, Scored, Usage, described
from swarm.generation.openai_api.requests import Message, Request, conversation_of
from swarm.generation.sampling import MOST_TOP

_LOGPROBS = "message.output_text.logprobs"


class ResponseRequest(Request):
    prompt_field: ClassVar[str] = "input"

    input: str | list[Message]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    metadata: dict[str, str] | None = None

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.include else None

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens

    @property
    def conversation(self) -> list[dict[str, str]]:
        said = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else conversation_of(self.input)
        return ([{"role": "system", "content": self.instructions}] if self.instructions else []) + said

    def check(self) -> None:
        super().check()
        if not self.input:
            raise Refusal(400, "input has no messages", param="input")
        if self.top_logprobs and not self.include:
            raise Refusal(400, f"top_logprobs needs include: {_LOGPROBS}", param="top_logprobs")


class ResponseAnswer:
    tail = b""
    """What follows the last event."""

    def __init__(self, wanted: ResponseRequest, *, digits: str, created: int, model: str) -> None:
        self._message_id = f"msg_{digits}"
        sampling = wanted.sampling()
        self._about: dict[str, Any] = {
            "id": f"resp_{digits}", "object": "response", "created_at": created, "model": model, "error": None,
            "instructions": wanted.instructions, "max_output_tokens": wanted.max_output_tokens,
            "metadata": wanted.metadata or {}, "parallel_tool_calls": False, "previous_response_id": None,
            "store": False, "temperature": sampling.temperature, "text": {"format": {"type": "text"}},
            "tool_choice": "none", "tools": [], "top_logprobs": wanted.num_top or 0, "top_p": sampling.top_p,
            "truncation": "disabled",
        }  # fmt: skip
        self._num_events = 0
        self._text = ""
        self._scored: list[Scored] = []
        self._finish_reason = ""

    def choice(self, index: int, text: str, finish_reason: str, scored: Sequence[Scored]) -> dict[str, Any]:
        status = "completed" if finish_reason == "stop" else "incomplete"
        return self._message(status, [_part(text, scored)])

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        status = choices[0]["status"]
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return self._about | {"status": status, "incomplete_details": why, "output": choices, "usage": counts}

    def opening(self, num_texts: int) -> list[dict[str, Any]]:
        begun = self._about | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=self._message("in_progress", [])),
            self._of_part("response.content_part.added", part=_part("", ())),
        ]

    def piece(self, index: int, text: str, scored: Sequence[Scored]) -> list[dict[str, Any]]:
        self._text += text
        self._scored += scored
        return [self._of_part("response.output_text.delta", delta=text, logprobs=described(scored))]

    def ending(self, index: int, finish_reason: str, scored: Sequence[Scored]) -> list[dict[str, Any]]:
        """The text has ended; `closing` says so."""
        self._scored += scored
        self._finish_reason = finish_reason
        return []

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        message = self.choice(0, self._text, self._finish_reason, self._scored)
        [part] = message["content"]
        whole = self.whole([message], usage)
        return [
            self._of_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._of_part("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=message),
            self._event(f"response.{whole['status']}", response=whole),
        ]

    def failed(self, refusal: Refusal) -> dict[str, Any]:
        return self._event("error", **{name: refusal.body["error"][name] for name in ("code", "message", "param")})

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        about = {"id": self._message_id, "type": "message", "role": "assistant"}
        return about | {"status": status, "content": content}

    def _of_part(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **more}


def _part(text: str, scored: Sequence[Scored]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": described(scored)}
