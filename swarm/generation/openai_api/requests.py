"""Reads the bodies of requests: their fields and allowed values, and fields that are refused as not supported.

A field that is not named here is ignored, as OpenAI's servers do.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.generation.openai_api.refusals import Refusal
from swarm.generation.sampling import MOST_TOP_K, Sampling

MOST_STOPS = 16
_SEEDS = 2**63
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields of OpenAI's API, and of similar servers, that are not supported, with the values that change nothing."""
_EXPECTED = {
    "prompt": "must be a text, or a list of tokens, or a list with one of either",
    "stop": f"must be a text, or a list of at most {MOST_STOPS} texts, none of them empty",
}
"""Error messages for fields that may be of several types."""

_Text = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    """A record that converts no types: a number is not accepted for a text or a boolean, for example."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: bool | None = None


class _Request(_Strict):
    """The fields that both kinds of request have."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=MOST_TOP_K)
    seed: int | None = Field(None, ge=-_SEEDS, lt=_SEEDS)
    stop: _Text | Annotated[list[_Text], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> list[str]:
        """Strings before which the text ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, seed: int) -> Sampling:
        """How tokens are chosen.

        Args:
            seed: the seed for a request that has none.
        """
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=seed if self.seed is None else self.seed,
        )

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        """The name of the field for the most tokens that the client wants, and its value; None if the client gives
        none."""
        return "max_tokens", self.max_tokens


class CompletionRequest(_Request):
    """A request to continue a text."""

    prompt: str | list[str] | list[int] | list[list[int]]


class _Part(_Strict):
    type: Literal["text"]
    text: str


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]
    # Tools are not supported, nor are messages that call them.
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None


class ChatRequest(_Request):
    """A request to answer in a conversation."""

    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().most_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The messages in the form for chat templates, in which OpenAI's role `developer` is called `system`."""
        return [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": message.content
                if isinstance(message.content, str)
                else "".join(part.text for part in message.content),
            }
            for message in self.messages
        ]


Request = TypeVar("Request", bound=_Request)


def parse(kind: type[Request], body: bytes) -> Request:
    """Read the body of a request. Raises Refusal."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    for name, value in (request.model_extra or {}).items():
        if name in _NEUTRAL and value is not None and not _is_neutral(name, value):
            raise Refusal(400, f"{name} is not supported here, but for {_neutral_values(name)}", param=name)
    if request.stream_options is not None and not request.stream:
        raise Refusal(400, "stream_options needs stream: true", param="stream_options")
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
    return Refusal(400, f"{where}: {fault['msg']}", param=name)
