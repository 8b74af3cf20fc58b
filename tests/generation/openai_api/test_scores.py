"""How likely tokens were is told in OpenAI's form."""

from typing import Any

import httpx2
import pytest

from tests.generation.openai_api.served import BODIES, CHAT, COMPLETION, client_of, events_of
from tests.support.scripted_model import RUN, ScriptedEngine


async def test_a_completion_tells_how_likely_its_tokens_were() -> None:
    """A token that is not among the likeliest is told beside them, and a part of a character as its bytes."""
    async with client_of(ScriptedEngine("hé")) as client:
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
            choices = [choice for event in events_of(response) for choice in event["choices"]]
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
    async with client_of(ScriptedEngine("hé\0")) as client:
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
            for event in events_of(await client.post("/chat/completions", json=body | {"stream": True}))
            for token in (event["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert streamed == choice["logprobs"]["content"]


async def test_a_stream_tells_scores_beside_the_text_that_they_are_of(client: httpx2.AsyncClient) -> None:
    body = COMPLETION | {"echo": True, "logprobs": 1, "stream": True, "stop": ["lo!"]}
    choices = [event["choices"][0] for event in events_of(await client.post("/completions", json=body))]
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
