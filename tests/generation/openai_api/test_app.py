"""The answers and errors of the routes, in OpenAI's form."""

import asyncio
import dataclasses
import json
import logging
import random
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
from tests.generation.openai_api.served import BODIES, CHAT, COMPLETION, client_of, events_of
from tests.support.manual_clock import ManualClock
from tests.support.scripted_model import RUN, ScriptedEngine, scripted_model


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
    events = events_of(await client.post("/completions", json=COMPLETION | {"stream": True}))
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == "hello"
    assert len(choices) == 6
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["length"]
    assert {event["object"] for event in events} == {"text_completion"}
    assert not any("usage" in event for event in events)

    events = events_of(await client.post("/chat/completions", json=CHAT | {"stream": True}))
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
    *events, last = events_of(await client.post(f"/{route}", json=body))
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


@pytest.mark.parametrize("stop", ["ll", ["x", "ll"]])
async def test_a_text_ends_before_a_stop(client: httpx2.AsyncClient, stop: Any) -> None:
    [choice] = (await client.post("/completions", json=COMPLETION | {"stop": stop})).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("he", "stop")
    events = events_of(await client.post("/completions", json=COMPLETION | {"stop": stop, "stream": True}))
    assert "".join(event["choices"][0]["text"] for event in events) == "he"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_text_ends_with_an_end_token_which_counts_and_is_not_said() -> None:
    async with client_of(ScriptedEngine("hi\0")) as client:
        answer = (await client.post("/completions", json=COMPLETION)).json()
        assert answer["choices"][0] == {"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop"}
        assert answer["usage"]["completion_tokens"] == 3
    async with client_of(ScriptedEngine("\0")) as client:
        answer = (await client.post("/chat/completions", json=CHAT)).json()
        assert answer["choices"][0]["message"]["content"] == ""
        events = events_of(await client.post("/completions", json=COMPLETION | {"stream": True}))
        assert [event["choices"][0]["finish_reason"] for event in events] == ["stop"]


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
    async with client_of(engine, model=model, most_requests=40) as client:
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
    async with client_of(engine, model=dataclasses.replace(scripted_model(engine), template=template)) as client:
        chats = [asyncio.create_task(client.post("/chat/completions", json=CHAT)) for _ in range(2)]
        [told], [other] = await asyncio.wait(chats, return_when=asyncio.FIRST_COMPLETED)
        assert told.result().status_code == 429
        other.cancel()
        await asyncio.wait([other])


async def test_several_prompts_and_several_texts_of_each(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"model": RUN, "prompt": ["one", "two"], "n": 2, "max_tokens": 5, "seed": 3}
    answer = (await client.post("/completions", json=body)).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(n, "hello") for n in range(4)]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 20, "total_tokens": 26}
    asked = [(prompt, sampling.seed) for prompt, sampling, _ in engine.asked]
    assert asked == [(b"one", 3), (b"one", 4), (b"two", 3), (b"two", 4)]
    events = events_of(await client.post("/completions", json=body | {"stream": True}))
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
    async with client_of(engine, template=template) as client:
        assert (await client.post("/chat/completions", json=CHAT | {"messages": messages})).status_code == 200
    assert engine.asked[0][0] == b"[system:{{ 1 + 1 }}][user:ab][assistant:c][user:]True"


async def test_what_the_template_refuses_and_a_model_without_one(engine: ScriptedEngine) -> None:
    async with client_of(engine, template="{{ raise_exception('users go first') }}") as client:
        response = await client.post("/chat/completions", json=CHAT)
        assert response.status_code == 400
        assert "users go first" in response.json()["error"]["message"]
    async with client_of(engine, template=None) as client:
        response = await client.post("/chat/completions", json=CHAT)
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]
        assert (await client.post("/completions", json=COMPLETION)).status_code == 200


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
