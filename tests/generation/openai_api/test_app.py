"""The answers and errors of the routes, in OpenAI's form."""

import asyncio
import dataclasses
import json
import logging
import random
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import httpx2
import pytest

from swarm.data.chat import ChatTemplate
from swarm.data.template_process import Limits
from swarm.errors import Overloaded, PeerUnavailable
from swarm.generation import text_model
from swarm.generation.openai_api.app import Api
from swarm.generation.openai_api.gate import Gate
from swarm.generation.text_model import TextModel
from tests.support.manual_clock import ManualClock
from tests.support.scripted_model import RUN, ScriptedEngine, scripted_model

COMPLETION = {"model": RUN, "prompt": "say", "max_tokens": 5}
CHAT = {"model": RUN, "messages": [{"role": "user", "content": "say"}], "max_tokens": 5}
BODIES = {"completions": COMPLETION, "chat/completions": CHAT}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[httpx2.AsyncClient]:
    async with _client(engine) as client:
        yield client


def _client(
    engine: ScriptedEngine, *, template: str | None = "{{ messages[0].content }}", model: TextModel | None = None,
    most_requests: int = 4,
) -> httpx2.AsyncClient:  # fmt: skip
    model = model or scripted_model(engine, template=template)
    api = Api(model, default_tokens=30, clock=ManualClock(1000.0), numbers=random.Random(0))
    gate = Gate(api.app(), token=None, most_requests=most_requests)
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(gate), base_url="http://server/v1")


def _events(response: httpx2.Response) -> list[Any]:
    """The events of a stream, without the word that ends it."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last, end = response.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_the_model_is_listed_with_run_and_round(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
    listed = (await client.get("/models")).json()
    assert listed["object"] == "list"
    model, plain = listed["data"]
    assert plain == model | {"id": RUN}
    assert model == {"id": f"{RUN}@7", "object": "model", "created": 1000, "owned_by": "swarm", "max_model_len": 100}
    engine.round = 9
    assert (await client.get("/models")).json()["data"][0]["id"] == f"{RUN}@9"
    for name in (RUN, f"{RUN}@7", f"{RUN}@9"):
        assert (await client.get(f"/models/{name}")).json()["id"] == f"{RUN}@9"
    # Another text, which is under way, has older weights.
    engine.round = 8
    assert (await client.get(f"/models/{RUN}@9")).json()["id"] == f"{RUN}@8"


@pytest.mark.parametrize("name", ["gpt-4", "", f"{RUN}@6", f"{RUN}@8", f"{RUN}@", f"{RUN}@x", f"{RUN}@7@7", f"@{RUN}"])
async def test_another_model_is_not_found(client: httpx2.AsyncClient, name: str) -> None:
    """Such models are also rounds before those that the server has had, and rounds to come."""
    for route, body in BODIES.items():
        response = await client.post(f"/{route}", json=body | {"model": name})
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "invalid_request_error")
        assert f"{RUN}@7" in error["message"]


async def test_a_completion(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
    answer = (await client.post("/completions", json=COMPLETION)).json()
    assert answer.pop("id").startswith("cmpl-")
    assert answer == {
        "object": "text_completion", "created": 1000, "model": f"{RUN}@7",
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
    }  # fmt: skip
    assert engine.asked[0][0] == b"say"
    assert engine.under_way == 0


async def test_a_chat(client: httpx2.AsyncClient) -> None:
    answer = (await client.post("/chat/completions", json=CHAT)).json()
    assert answer.pop("id").startswith("chatcmpl-")
    message = {"role": "assistant", "content": "hello", "refusal": None}
    assert answer == {
        "object": "chat.completion", "created": 1000, "model": f"{RUN}@7",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
    }  # fmt: skip


async def test_streams_say_the_same_piece_by_piece(client: httpx2.AsyncClient) -> None:
    events = _events(await client.post("/completions", json=COMPLETION | {"stream": True}))
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == "hello"
    assert len(choices) == 6
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["length"]
    assert {event["object"] for event in events} == {"text_completion"}
    assert not any("usage" in event for event in events)

    events = _events(await client.post("/chat/completions", json=CHAT | {"stream": True}))
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "hello"
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] == "length"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("route", BODIES)
async def test_a_stream_tells_its_usage_if_it_is_asked(client: httpx2.AsyncClient, route: str) -> None:
    body = BODIES[route] | {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = _events(await client.post(f"/{route}", json=body))
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


@pytest.mark.parametrize("stop", ["ll", ["x", "ll"]])
async def test_a_text_ends_before_a_stop(client: httpx2.AsyncClient, stop: Any) -> None:
    [choice] = (await client.post("/completions", json=COMPLETION | {"stop": stop})).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("he", "stop")
    events = _events(await client.post("/completions", json=COMPLETION | {"stop": stop, "stream": True}))
    assert "".join(event["choices"][0]["text"] for event in events) == "he"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_text_ends_with_an_end_token_which_counts_and_is_not_said() -> None:
    async with _client(ScriptedEngine("hi\0")) as client:
        answer = (await client.post("/completions", json=COMPLETION)).json()
        assert answer["choices"][0] == {"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop"}
        assert answer["usage"]["completion_tokens"] == 3
    async with _client(ScriptedEngine("\0")) as client:
        answer = (await client.post("/chat/completions", json=CHAT)).json()
        assert answer["choices"][0]["message"]["content"] == ""
        events = _events(await client.post("/completions", json=COMPLETION | {"stream": True}))
        assert [event["choices"][0]["finish_reason"] for event in events] == ["stop"]


async def test_characters_come_whole_and_unescaped() -> None:
    async with _client(ScriptedEngine("→🙂\u2028")) as client:
        response = await client.post("/completions", json=COMPLETION | {"stream": True, "max_tokens": 10})
        pieces = [event["choices"][0]["text"] for event in _events(response)]
        assert [piece for piece in pieces if piece] == ["→", "🙂", "\u2028"]


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
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": "x" * 100}]}, "messages"),
        ({"max_completion_tokens": 98, "max_tokens": 1}, "max_completion_tokens"),
        ({"max_tokens": 98}, "max_tokens"),
    ],
)
async def test_what_is_too_long_in_a_chat_is_named(
    client: httpx2.AsyncClient, body: dict[str, Any], param: str
) -> None:
    response = await client.post("/chat/completions", json=CHAT | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_template_that_takes_for_ever_is_refused_and_holds_up_nobody(engine: ScriptedEngine) -> None:
    """Other requests are answered meanwhile, however many conversations wait."""
    num_begun = 0

    class Counting(ChatTemplate):
        def render(self, *arguments: Any, **options: Any) -> str:
            nonlocal num_begun
            num_begun += 1
            return super().render(*arguments, **options)

    template = Counting("{{ 9 ** (9 ** 9) }}", {}, now=datetime.now, limits=Limits(seconds=0.3))
    model = dataclasses.replace(scripted_model(engine), template=template)
    async with _client(engine, model=model, most_requests=40) as client:
        chats = [asyncio.create_task(client.post("/chat/completions", json=CHAT)) for _ in range(20)]
        assert (await client.post("/completions", json=COMPLETION)).status_code == 200
        response = await chats[0]
        assert response.status_code == 400
        assert "it computes for more than 0.3 seconds" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "messages"
        before = num_begun
        for chat in chats:
            chat.cancel()
        await asyncio.wait(chats)
        assert num_begun <= before + 1, "nor is what they began with gone on with"


async def test_a_conversation_that_others_hold_up_is_told_to_come_again(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_model, "TURN_SECONDS", 0.1)
    template = ChatTemplate("{{ 9 ** (9 ** 9) }}", {}, now=datetime.now, limits=Limits(seconds=60.0))
    async with _client(engine, model=dataclasses.replace(scripted_model(engine), template=template)) as client:
        chats = [asyncio.create_task(client.post("/chat/completions", json=CHAT)) for _ in range(2)]
        [told], [other] = await asyncio.wait(chats, return_when=asyncio.FIRST_COMPLETED)
        assert told.result().status_code == 429
        other.cancel()
        await asyncio.wait([other])


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [(["say"], b"say"), ([115, 97], b"sa"), ([[115, 97]], b"sa"), ("é\0", "é\0".encode()), ("\ufffd", b"\xef\xbf\xbd")],
)
async def test_prompts_may_be_told_in_several_ways(
    client: httpx2.AsyncClient, engine: ScriptedEngine, prompt: Any, tokens: bytes
) -> None:
    assert (await client.post("/completions", json=COMPLETION | {"prompt": prompt})).status_code == 200
    assert engine.asked[0][0] == tokens


async def test_several_prompts_and_several_texts_of_each(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"model": RUN, "prompt": ["one", "two"], "n": 2, "max_tokens": 5, "seed": 3}
    answer = (await client.post("/completions", json=body)).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(n, "hello") for n in range(4)]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 20, "total_tokens": 26}
    asked = [(prompt, sampling.seed) for prompt, sampling, _ in engine.asked]
    assert asked == [(b"one", 3), (b"one", 4), (b"two", 3), (b"two", 4)]
    events = _events(await client.post("/completions", json=body | {"stream": True}))
    for index in range(4):
        of_it = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in of_it) == "hello"
        assert of_it[-1]["finish_reason"] == "length"
    chat = (await client.post("/chat/completions", json=CHAT | {"n": 3})).json()
    assert [choice["message"]["content"] for choice in chat["choices"]] == ["hello"] * 3


async def test_it_tells_that_it_runs(engine: ScriptedEngine) -> None:
    api = Api(scripted_model(engine), default_tokens=30, clock=ManualClock(1000.0), numbers=random.Random(0))
    gate = Gate(api.app(), token="secret", most_requests=4)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(gate), base_url="http://server") as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401


async def test_a_conversation_is_rendered_by_the_template(engine: ScriptedEngine) -> None:
    template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ add_generation_prompt }}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "{{ 1 + 1 }}"}, {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": "c", "tool_calls": []}, {"role": "user", "content": ""},
    ]  # fmt: skip
    async with _client(engine, template=template) as client:
        assert (await client.post("/chat/completions", json=CHAT | {"messages": messages})).status_code == 200
    assert engine.asked[0][0] == b"[system:{{ 1 + 1 }}][user:ab][assistant:c][user:]True"


async def test_what_the_template_refuses_and_a_model_without_one(engine: ScriptedEngine) -> None:
    async with _client(engine, template="{{ raise_exception('users go first') }}") as client:
        response = await client.post("/chat/completions", json=CHAT)
        assert response.status_code == 400
        assert "users go first" in response.json()["error"]["message"]
    async with _client(engine, template=None) as client:
        response = await client.post("/chat/completions", json=CHAT)
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]
        assert (await client.post("/completions", json=COMPLETION)).status_code == 200


async def test_a_completion_tells_how_likely_its_tokens_were() -> None:
    """A token that is not among the likeliest is told beside them, and a part of a character as its bytes."""
    async with _client(ScriptedEngine("hé")) as client:
        body = COMPLETION | {"max_tokens": 3, "logprobs": 2}
        [choice] = (await client.post("/completions", json=body)).json()["choices"]
        assert choice["text"] == "hé"
        assert choice["logprobs"] == {
            "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9"],
            "token_logprobs": [-0.25, -2.0, -4.0],
            "top_logprobs": [
                {"h": -0.25, "e": -0.5},
                {"h": -0.25, "e": -0.5, "bytes:\\xc3": -2.0},
                {"h": -0.25, "e": -0.5, "bytes:\\xa9": -4.0},
            ],
            "text_offset": [0, 1, 1],
        }
        [choice] = (await client.post("/completions", json=body | {"logprobs": 0})).json()["choices"]
        assert choice["logprobs"]["top_logprobs"] == [{"h": -0.25}, {"bytes:\\xc3": -2.0}, {"bytes:\\xa9": -4.0}]
        [choice] = (await client.post("/completions", json=body | {"logprobs": False})).json()["choices"]
        assert choice["logprobs"] is None


async def test_a_completion_may_begin_with_its_prompt(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
    """The first token of all has no probability. Neither stops nor end tokens are looked for in the prompt."""
    body = COMPLETION | {"prompt": "h\0ll", "echo": True, "logprobs": 1, "stop": "l", "max_tokens": 3}
    answer = (await client.post("/completions", json=body)).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("h\0llhe", "stop")
    assert choice["logprobs"] == {
        "tokens": ["h", "\0", "l", "l", "h", "e", "l"],
        "token_logprobs": [None, -4.0, -4.0, -4.0, -0.25, -0.5, -4.0],
        "top_logprobs": [
            None, {"h": -0.25, "\0": -4.0}, *[{"h": -0.25, "l": -4.0}] * 2, {"h": -0.25}, {"h": -0.25, "e": -0.5},
            {"h": -0.25, "l": -4.0},
        ],
        "text_offset": [0, 1, 2, 3, 4, 5, 6],
    }  # fmt: skip
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    body = COMPLETION | {"echo": True}
    assert (await client.post("/completions", json=body)).json()["choices"][0]["text"] == "sayhello"
    assert (await client.post("/completions", json=body)).json()["choices"][0]["logprobs"] is None
    assert engine.under_way == 0


async def test_a_prompt_may_be_scored_alone(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
    """Also one that has the model's full length, and several at once."""
    prompts = [[ord("h")] * 100, list(b"he")]
    body = {"model": RUN, "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1}
    for stream in (False, True):
        response = await client.post("/completions", json=body | {"stream": stream})
        if stream:
            choices = [choice for event in _events(response) for choice in event["choices"]]
            choices = [choice for index in (0, 1) for choice in choices if choice["index"] == index][::2]
        else:
            choices = response.json()["choices"]
            assert {choice["finish_reason"] for choice in choices} == {"length"}
        assert [choice["text"] for choice in choices] == ["h" * 100, "he"]
        assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[None] + [-0.25] * 99, [None, -0.5]]
    for more in ({"echo": False}, {"max_tokens": None}):
        [choice] = (await client.post("/completions", json=body | {"prompt": prompts[0]} | more)).json()["choices"]
        assert choice["text"] == ("h" * 100 if "max_tokens" in more else "")
    longer: tuple[tuple[dict[str, Any], str], ...] = (
        ({"max_tokens": 1}, "max_tokens"), ({"prompt": [1] * 101}, "prompt")
    )  # fmt: skip
    for too_long, param in longer:
        response = await client.post("/completions", json=body | {"prompt": prompts[0]} | too_long)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert engine.under_way == 0


async def test_a_chat_tells_how_likely_its_tokens_were() -> None:
    async with _client(ScriptedEngine("hé\0")) as client:
        body = CHAT | {"logprobs": True, "top_logprobs": 1}
        [choice] = (await client.post("/chat/completions", json=body)).json()["choices"]
        likeliest = [{"token": "h", "logprob": -0.25, "bytes": [104]}]
        assert choice["logprobs"] == {
            "content": [
                {"token": "h", "logprob": -0.25, "bytes": [104], "top_logprobs": likeliest},
                {"token": "\ufffd", "logprob": -2.0, "bytes": [0xC3], "top_logprobs": likeliest},
                {"token": "\ufffd", "logprob": -4.0, "bytes": [0xA9], "top_logprobs": likeliest},
                {"token": "\0", "logprob": -4.0, "bytes": [0], "top_logprobs": likeliest},
            ],
            "refusal": None,
        }
        [plain] = (await client.post("/chat/completions", json=CHAT | {"logprobs": True})).json()["choices"]
        assert [token["top_logprobs"] for token in plain["logprobs"]["content"]] == [[]] * 4
        streamed = [
            token
            for event in _events(await client.post("/chat/completions", json=body | {"stream": True}))
            for token in (event["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert streamed == choice["logprobs"]["content"]


async def test_a_stream_tells_scores_beside_the_text_that_they_are_of(client: httpx2.AsyncClient) -> None:
    body = COMPLETION | {"echo": True, "logprobs": 1, "stream": True, "stop": ["lo!"]}
    choices = [event["choices"][0] for event in _events(await client.post("/completions", json=body))]
    told = [(choice["text"], (choice["logprobs"] or {"tokens": []})["tokens"]) for choice in choices]
    assert told == [("sayh", list("sayh")), ("e", ["e"]), ("l", list("ll")), ("lo", ["o"]), ("", [])]


@pytest.mark.parametrize("route", BODIES)
async def test_more_scores_than_are_told_at_once_are_refused(
    client: httpx2.AsyncClient, engine: ScriptedEngine, route: str
) -> None:
    many = {"logprobs": 20} if route == "completions" else {"logprobs": True, "top_logprobs": 20}
    response = await client.post(f"/{route}", json=BODIES[route] | many | {"n": 128, "max_tokens": 97, "echo": False})
    assert response.status_code == 200
    engine.longest = 1000
    response = await client.post(f"/{route}", json=BODIES[route] | many | {"n": 128, "max_tokens": 900, "echo": False})
    assert response.status_code == 400
    assert "262144 are told at once" in response.json()["error"]["message"]


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
    ("route", "name", "value"),
    [
        ("completions", "logprobs", True),
        ("chat/completions", "logprobs", 1),
        ("chat/completions", "echo", True),
        ("chat/completions", "max_tokens", 0),
    ],
)
async def test_fields_that_only_the_other_kind_of_request_has(
    client: httpx2.AsyncClient, route: str, name: str, value: Any
) -> None:
    response = await client.post(f"/{route}", json=BODIES[route] | {name: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


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


@pytest.mark.parametrize("content", [None, 5, [{"type": "image_url", "image_url": {"url": "http://x"}}], [{}]])
async def test_the_refusal_of_a_message_says_what_it_may_have(client: httpx2.AsyncClient, content: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": content}]
    response = await client.post("/chat/completions", json=CHAT | {"messages": messages})
    assert response.json()["error"]["message"] == "messages.1.content must be a text, or a list of parts of type text"


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


async def test_there_is_nothing_elsewhere(client: httpx2.AsyncClient) -> None:
    for response, status in (
        (await client.get("/nothing"), 404),
        (await client.post("/embeddings", json={}), 404),
        (await client.get("/completions"), 405),
        (await client.post("/models", json={}), 405),
    ):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        (Overloaded("no room", retry_after_seconds=3.2), 429, "no room"),
        (PeerUnavailable("nobody serves stage 1"), 503, "nobody serves stage 1"),
        (MemoryError("secret"), 503, "there is no memory for this now"),
        (KeyError("secret"), 500, "the server made a mistake"),
    ],
)
async def test_what_goes_wrong_is_told_and_logged_without_the_text(
    client: httpx2.AsyncClient, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture, fault: Exception, status: int,
    said: str,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, logger="swarm")
    engine.fault = fault
    for stream in (False, True):
        response = await client.post("/completions", json=COMPLETION | {"stream": stream})
        assert response.status_code == status
        assert response.json()["error"]["message"] == said
        assert response.headers.get("retry-after") == {429: "3", 503: "2"}.get(status)
    engine.fault_after = 2
    response = await client.post("/completions", json=COMPLETION | {"stream": True})
    assert response.status_code == 200
    *_, last, end = response.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == said
    assert end == ""
    assert engine.under_way == 0
    assert "secret" not in caplog.text
    assert "say" not in caplog.text
    assert bool([record for record in caplog.records if record.name.startswith("swarm")]) == (status == 500)
