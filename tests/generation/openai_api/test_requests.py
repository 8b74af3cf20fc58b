"""What a request may ask, and what it is refused for."""

from typing import Any

import httpx2
import pytest

from tests.generation.openai_api.served import BODIES, CHAT, COMPLETION
from tests.support.scripted_model import RUN, ScriptedEngine

REFUSED: dict[str, list[Any]] = {
    "max_tokens": [-1, 1.5, "5", True, []], "temperature": [-0.1, 2.1, 1e300, "1", True], "top_p": [1.1, -1, "x", True],
    "top_k": [-2, 1.5, 2**31, 10**30, True], "seed": [1.5, 2**63, -(2**63) - 1, "1"], "stop": [["x"] * 17, 5, [5], {}],
    "stream": [1, "true"], "stream_options": [{"include_usage": True}, 5], "n": [0, 129, "1", True, 1.5],
    "logprobs": [-1, 21, 1.5, "1"], "top_logprobs": [3, 21, -1, "1"], "echo": ["yes", 1], "best_of": [2],
    "suffix": ["x"], "logit_bias": [{"5": 1}], "presence_penalty": [0.5], "frequency_penalty": [-1], "tools": [[{}]],
    "tool_choice": ["required"], "response_format": [{"type": "json_object"}], "chat_template": ["x"], "min_p": [0.1],
    "ignore_eos": [True], "grammar": ["root ::= x"], "n_predict": [5], "repeat_penalty": [1.1],
    "reasoning_effort": ["low"], "whatever": [[1], 0, "x", True], "model": [5, None],
}  # fmt: skip


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("name", REFUSED)
async def test_fields_that_cannot_be_or_are_not_supported(
    client: httpx2.AsyncClient, engine: ScriptedEngine, route: str, name: str
) -> None:
    for value in REFUSED[name]:
        response = await client.post(f"/{route}", json=BODIES[route] | {name: value})
        assert response.status_code == 400, value
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", name)
        assert name in error["message"]
    assert engine.asked == []


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [""], ["a", ""], ["a"] * 129, [256], [[1], [256]], [1, "a"], [-1], [1.5], [True], 5, {}, None],
)
async def test_prompts_that_cannot_be(client: httpx2.AsyncClient, prompt: Any) -> None:
    response = await client.post("/completions", json=COMPLETION | {"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [5],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "king", "content": "x"}],
        [{"role": "tool", "content": "x", "tool_call_id": "1"}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": ""}],
    ],
)
async def test_messages_that_cannot_be(client: httpx2.AsyncClient, messages: Any) -> None:
    """With this template the last of these makes a prompt without tokens."""
    response = await client.post("/chat/completions", json=CHAT | {"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("messages", "prompt")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"x"',
        b"\xff",
        b'{"model": "\\ud800"}',
        b'{"prompt": "\\ud800", "model": "m"}',
        b'{"max_tokens": ' + b"1" * 5000 + b"}",
        b"[" * 100_000,
        b'{"temperature": NaN}',
    ],
)
async def test_bodies_that_are_no_json_objects(client: httpx2.AsyncClient, body: bytes) -> None:
    response = await client.post("/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("route", BODIES)
async def test_fields_that_change_nothing_are_taken(client: httpx2.AsyncClient, route: str) -> None:
    neutral = {
        "n": 1, "logprobs": False, "top_logprobs": 0, "presence_penalty": 0.0, "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "logit_bias": {}, "user": "me", "metadata": {"a": "b"}, "store": True,
        "service_tier": "auto", "whatever": [], "grammar": "", "top_p": 0, "top_k": -1, "stop": "",
        "repeat_penalty": 1.0, "reasoning_effort": "none", "skip_special_tokens": True,
    }  # fmt: skip
    nulls = dict.fromkeys(["temperature", "top_p", "seed", "stop", "stream", "stream_options", "n", "suffix", "tools"])
    for more in (neutral, nulls):
        assert (await client.post(f"/{route}", json=BODIES[route] | more)).status_code == 200


async def test_sampling_is_what_the_request_says(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
    wanted = {"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": -5}
    await client.post("/completions", json=COMPLETION | wanted)
    found = engine.asked[0][1]
    assert (found.temperature, found.top_p, found.top_k, found.seed) == (0.0, 0.5, 3, -5)
    for _ in range(2):
        await client.post("/completions", json=COMPLETION)
    first, second = (sampling for _, sampling, _ in engine.asked[1:])
    assert (first.temperature, first.top_p, first.top_k) == (1.0, 1.0, 0)
    assert first.seed != second.seed


async def test_how_long_a_text_may_become(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
    without = {"model": RUN, "messages": CHAT["messages"]}
    for body in (without, without | {"max_completion_tokens": 3, "max_tokens": 9}, without | {"max_tokens": 4}):
        assert (await client.post("/chat/completions", json=body)).status_code == 200
    await client.post("/completions", json={"model": RUN, "prompt": "x" * 90})
    assert [max_tokens for _, _, max_tokens in engine.asked] == [30, 3, 4, 10]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x" * 100},
        {"prompt": "x" * 100, "max_tokens": None},
        {"prompt": "x" * 96},
        {"max_tokens": 98},
        {"max_tokens": 10**30},
    ],
)
async def test_what_is_too_long_is_refused(client: httpx2.AsyncClient, body: dict[str, Any]) -> None:
    """The error names the field that is too long: the prompt only if that leaves no room."""
    is_prompt = len(body.get("prompt", "")) == 100
    for stream in (False, True):
        response = await client.post("/completions", json=COMPLETION | body | {"stream": stream})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("prompt" if is_prompt else "max_tokens")
        assert error["message"].startswith("max_tokens is more than the") != is_prompt
        assert "the model takes 100 tokens" in error["message"]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [(["say"], b"say"), ([115, 97], b"sa"), ([[115, 97]], b"sa"), ("é\0", "é\0".encode()), ("\ufffd", b"\xef\xbf\xbd")],
)
async def test_prompts_may_be_told_in_several_ways(
    client: httpx2.AsyncClient, engine: ScriptedEngine, prompt: Any, tokens: bytes
) -> None:
    assert (await client.post("/completions", json=COMPLETION | {"prompt": prompt})).status_code == 200
    assert engine.asked[0][0] == tokens
