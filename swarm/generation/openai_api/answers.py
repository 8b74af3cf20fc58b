"""The bodies of answers, whole and as events of a stream, and of the errors that clients get instead."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from starlette.responses import JSONResponse

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}
END_OF_STREAM = b"data: [DONE]\n\n"
STILL_HERE = b": the text goes on\n\n"
"""A comment in a stream, which clients skip: it shows that the connection lives."""


class Refusal(Exception):
    """A request is refused. The message is for the client."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_seconds: int = 0
    ) -> None:
        """
        Args:
            code: OpenAI's name for the fault, if there is one.
            param: the field of the request that is at fault.
            retry_seconds: after how long the client may try again; 0 if that does not help.
        """
        super().__init__(message)
        self.status = status
        self._code = code
        self._param = param
        self._retry_seconds = retry_seconds

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self._param, "code": self._code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(self._retry_seconds)} if self._retry_seconds else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def event(body: Mapping[str, Any]) -> bytes:
    name = f"event: {body['type']}\n".encode() if "type" in body else b""
    return name + b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Scored(NamedTuple):
    """A token of a text with its score.

    Attributes:
        token: the bytes that it adds to the text.
        offset: how many characters the text before it has.
        logprob: the logarithm of its probability; None for the first one of all, before which there is nothing.
        top: the likeliest tokens at its position with theirs, the likeliest first.
    """

    token: bytes
    offset: int
    logprob: float | None
    top: Sequence[tuple[bytes, float]]


@dataclass(frozen=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    @property
    def body(self) -> dict[str, int]:
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return counts | {"total_tokens": sum(counts.values())}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer with its texts, in the form of a conversation's messages or of completions.

    Attributes:
        created: when the answer was made, in seconds since the epoch.
        includes_usage: whether a stream ends with the numbers of tokens.
    """

    is_chat: bool
    id: str
    created: int
    model: str
    includes_usage: bool = False
    tail: ClassVar[bytes] = END_OF_STREAM
    """What follows the last event of a stream."""

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._body(kind, choices) | {"usage": usage.body}

    def choice(self, index: int, text: str, finish_reason: str, scored: Sequence[Scored]) -> dict[str, Any]:
        """One text of the whole answer, with its tokens' scores if these are wanted."""
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
        return self._choice(index, said, finish_reason, scored)

    def opening(self, num_texts: int) -> list[dict[str, Any]]:
        said = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(index, said, None) for index in range(num_texts)] if self.is_chat else []

    def piece(self, index: int, text: str, scored: Sequence[Scored]) -> list[dict[str, Any]]:
        return [self._chunk(index, {"delta": {"content": text}} if self.is_chat else {"text": text}, None, scored)]

    def ending(self, index: int, finish_reason: str, scored: Sequence[Scored]) -> list[dict[str, Any]]:
        return [self._chunk(index, {"delta": {}} if self.is_chat else {"text": ""}, finish_reason, scored)]

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        return [self._body(self._chunk_kind, []) | {"usage": usage.body}] if self.includes_usage else []

    def failed(self, refusal: Refusal) -> dict[str, Any]:
        return refusal.body

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(
        self, index: int, said: dict[str, Any], finish_reason: str | None, scored: Sequence[Scored] = ()
    ) -> dict[str, Any]:
        body = self._body(self._chunk_kind, [self._choice(index, said, finish_reason, scored)])
        return body | {"usage": None} if self.includes_usage else body

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(
        self, index: int, said: dict[str, Any], finish_reason: str | None, scored: Sequence[Scored]
    ) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if scored:
            logprobs = {"content": described(scored), "refusal": None} if self.is_chat else _of_completion(scored)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}


def described(scored: Sequence[Scored]) -> list[dict[str, Any]]:
    def of(token: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}

    return [of(one.token, one.logprob) | {"top_logprobs": [of(*likely) for likely in one.top]} for one in scored]


def _of_completion(scored: Sequence[Scored]) -> dict[str, Any]:
    return {
        "tokens": [_name(one.token) for one in scored],
        "token_logprobs": [one.logprob for one in scored],
        "top_logprobs": [_by_name(one) for one in scored],
        "text_offset": [one.offset for one in scored],
    }


def _by_name(one: Scored) -> dict[str, float] | None:
    """The likeliest tokens, and this one if it is not among them. Of tokens with one name the likeliest is told."""
    if one.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in (*one.top, (one.token, one.logprob)):
        found.setdefault(_name(token), logprob)
    return found


def _name(token: bytes) -> str:
    """The token as a text. Parts of characters are written as OpenAI writes them, byte by byte."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
