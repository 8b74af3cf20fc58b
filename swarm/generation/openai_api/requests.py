"""Reads the bodies of requests: their fields and allowed values, and fields that are refused as not supported.

A field that is not named here might change the answer. So it is refused as well, as by OpenAI's own server, unless it
is null, false or empty.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.generation.openai_api.answers import Refusal
from swarm.generation.sampling import MOST_TOP, Sampling, require_number

MOST_STOPS = 16
MOST_CHOICES = 128
"""The most texts of one request."""
_SAMPLING = {parameter.name: type(parameter.default) for parameter in fields(Sampling)}
_NARROWER = {"temperature": (0, 2), "seed": (-(2**63), 2**63 - 1)}
"""OpenAI's limits of sampling parameters that are narrower than ours."""
_ALL_TOKENS = ("top_k", -1)
"""What some clients say where ours say 0."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(["dry_multiplier", "dynatemp_range", "frequency_penalty", "min_p", "min_tokens", "mirostat"], (0,)),
    **dict.fromkeys(["presence_penalty", "top_logprobs", "xtc_probability"], (0,)),
    **dict.fromkeys(["best_of", "length_penalty", "repeat_penalty", "repetition_penalty", "tfs_z", "typical_p"], (1,)),
    **dict.fromkeys(["allowed_token_ids", "bad_words", "documents", "functions", "stop_token_ids", "tools"], ([],)),
    **dict.fromkeys(["chat_template_kwargs", "logit_bias"], ({},)),
    **dict.fromkeys(
        ["add_special_tokens", "continue_final_message", "echo", "ignore_eos", "use_beam_search"], (False,)
    ),
    **dict.fromkeys(["audio", "chat_template", "guided_choice", "guided_grammar", "guided_json", "guided_regex"], ()),
    **dict.fromkeys(["prediction", "prompt_logprobs", "web_search_options"], ()),
    **dict.fromkeys(["function_call", "tool_choice"], ("none", "auto")),
    "add_generation_prompt": (True,),
    "modalities": (["text"],),
    "reasoning": ({"effort": "none"}, {"effort": None}),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "store": (False, True),
    "suffix": ("",),
    "text": ({"format": {"type": "text"}},),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
"""Fields of OpenAI's API, and of similar servers, that are not supported, with the values that change nothing."""
_INERT = frozenset({
    "cache_prompt", "cache_salt", "max_tool_calls", "metadata", "parallel_tool_calls", "priority", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "repeat_last_n", "request_id", "safety_identifier",
    "service_tier", "spaces_between_special_tokens", "user",
})  # fmt: skip
"""Fields that change no answer here, whatever their values."""
_EXPECTED = {
    "prompt": f"must be a text, a list of tokens, or a list of at most {MOST_CHOICES} of either",
    "stop": f"must be a text, or a list of at most {MOST_STOPS} texts",
    "logprobs": f"must be a number from 0 to {MOST_TOP}",
    "input": "must be a text, or a list of messages with a role and text",
}
"""Error messages for fields that may be of several types."""


class _Strict(BaseModel):
    """A record that converts no types: a number is not accepted for a text or a boolean, for example."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None


class Request(_Strict):
    """The fields that all kinds of request have, besides Sampling's, which stand in `model_extra`."""

    prompt_field: ClassVar[str]
    """The name of the field that has the prompt."""

    model: str
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_each(self) -> int:
        return 1

    @property
    def echoes(self) -> bool:
        return False

    @property
    def num_top(self) -> int | None:
        """How many of the likeliest tokens are told at each position; None if no scores are wanted."""
        return None

    def sampling(self, *, seed: int = 0) -> Sampling:
        """How tokens are chosen. The seed is for a client that gives none. Raises Refusal for the first parameter that
        cannot be."""
        given: dict[str, Any] = {"seed": seed}
        for name, value in (self.model_extra or {}).items():
            if name not in _SAMPLING or value is None:
                continue
            try:
                if name in _NARROWER:
                    require_number(name, value, _SAMPLING[name], *_NARROWER[name])
                given[name] = 0 if (name, value) == _ALL_TOKENS else value
                Sampling(**{name: given[name]})
            except ValueError as error:
                raise Refusal(400, str(error), param=name) from None
        return Sampling(**given)

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        """The name of the field for the most tokens that the client wants, and its value; None if the client gives
        none."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise Refusal for sampling parameters that cannot be, and for fields that do not go together."""
        self.sampling()
        if self.stream_options is not None and not self.stream:
            raise Refusal(400, "stream_options needs stream: true", param="stream_options")


class _ChoicesRequest(Request):
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)

    @property
    def num_each(self) -> int:
        return self.n or 1

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens


class CompletionRequest(_ChoicesRequest):
    prompt_field: ClassVar[str] = "prompt"

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | Literal[False] | None = None

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def num_top(self) -> int | None:
        return None if self.logprobs is False else self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [part for part in self.prompt if isinstance(part, int)]
        several = [part for part in self.prompt if not isinstance(part, int)] or [tokens]
        if len(several) * self.num_each > MOST_CHOICES:
            raise Refusal(400, f"one request gets at most {MOST_CHOICES} texts", param="prompt")
        return several


class _Part(_Strict):
    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(_Strict):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]
    # Tools are not supported, nor are messages that call them.
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None


def conversation_of(messages: Sequence[Message]) -> list[dict[str, str]]:
    """The messages in the form for chat templates, in which OpenAI's role `developer` is called `system`."""
    return [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.content
            if isinstance(message.content, str)
            else "".join(part.text for part in message.content),
        }
        for message in messages
    ]


class ChatRequest(_ChoicesRequest):
    prompt_field: ClassVar[str] = "messages"

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().most_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def conversation(self) -> list[dict[str, str]]:
        return conversation_of(self.messages)

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")


Kind = TypeVar("Kind", bound=Request)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """Read the body of a request. Raises Refusal."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    for name, value in (request.model_extra or {}).items():
        if name in _INERT or name in _SAMPLING or value is None:
            continue
        if name in _NEUTRAL and not _is_neutral(name, value):
            raise Refusal(400, f"{name} is not supported here, but for {_neutral_values(name)}", param=name)
        if name not in _NEUTRAL and value is not False and value not in ("", [], {}):
            raise Refusal(400, f"{name} is not known here, and might change the answer: leave it out", param=name)
    request.check()
    return request


def _is_neutral(name: str, value: object) -> bool:
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL[name])


def _neutral_values(name: str) -> str:
    return " or ".join(map(json.dumps, (*_NEUTRAL[name], None)))


def _refusal(error: ValidationError) -> Refusal:
    """Make a refusal from the first fault. It does not repeat what the client sent."""
    fault: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if fault["type"] == "json_invalid":
        return Refusal(400, f"the body is not valid JSON: {fault['msg'].removeprefix('Invalid JSON: ')}")
    if not fault["loc"]:
        return Refusal(400, "the body must be a JSON object")
    name = str(fault["loc"][0])
    if name in _EXPECTED and fault["type"] != "missing":
        return Refusal(400, f"{name} {_EXPECTED[name]}", param=name)
    where = ".".join(str(part) for part in fault["loc"])
    # Of a field that may have several types, pydantic's first fault speaks of the first type alone.
    message, is_content, _ = where.partition(".content.")
    if is_content:
        return Refusal(400, f"{message}.content must be a text, or a list of parts of type text", param=name)
    return Refusal(400, f"{where}: {fault['msg']}", param=name)
