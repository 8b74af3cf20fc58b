"""/v1/responses answers OpenAI's own client, and refuses what it does not support by its name."""

import random
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import ResponseOutputMessage, ResponseOutputText

from swarm.errors import PeerUnavailable
from swarm.generation.openai_api.app import Api
from tests.support.manual_clock import ManualClock
from tests.support.scripted_model import RUN, ScriptedEngine, scripted_model

TEMPLATE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
ASKED: dict[str, Any] = {"model": RUN, "input": "say", "max_output_tokens": 5}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine("hello\0")


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    model = scripted_model(engine, template=TEMPLATE)
    api = Api(model, default_tokens=30, clock=ManualClock(1000.0), numbers=random.Random(0))
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(api.app()))
    async with openai.AsyncOpenAI(
        base_url="http://server/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        yield client


async def test_a_response(client: openai.AsyncOpenAI, engine: ScriptedEngine) -> None:
    """It is incomplete where the most tokens were too few, and takes what it said for its next turn."""
    cut = await client.responses.create(**ASKED, temperature=0, top_p=0.5, metadata={"a": "b"})
    assert (cut.output_text, cut.status, cut.model) == ("hello", "incomplete", f"{RUN}@7")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert (cut.created_at, cut.temperature, cut.top_p, cut.metadata) == (1000, 0, 0.5, {"a": "b"})
    assert cut.usage is not None
    assert (cut.usage.input_tokens, cut.usage.output_tokens, cut.usage.total_tokens) == (10, 5, 15)
    whole = await client.responses.create(
        model=RUN,
        instructions="be brief",
        input=[
            {"role": "developer", "content": "a"}, {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
            *(item.model_dump() for item in cut.output), {"type": "message", "role": "user", "content": "c"},
        ],
    )  # fmt: skip
    assert (whole.output_text, whole.status, whole.incomplete_details) == ("hello", "completed", None)
    assert [asked[0] for asked in engine.asked] == [
        b"[user:say]",
        b"[system:be brief][system:a][user:b][assistant:hello][user:c]",
    ]
    assert whole.id != cut.id


async def test_a_stream_of_events_ends_with_the_whole_response(client: openai.AsyncOpenAI) -> None:
    scored: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = await client.responses.create(**ASKED, **scored)
    events = [event async for event in await client.responses.create(**ASKED, **scored, stream=True)]
    assert [event.type for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * 5, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == "hello"
    assert [event.logprobs[0].logprob for event in deltas] == [-0.25, -0.5, -4.0, -4.0, -4.0]
    last = events[-1]
    assert last.type == "response.incomplete"
    [message], [expected] = last.response.output, whole.output
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(expected, ResponseOutputMessage)
    assert message.content == expected.content
    [part] = message.content
    assert isinstance(part, ResponseOutputText)
    assert part.logprobs is not None
    assert [(token.token, token.top_logprobs[0].token) for token in part.logprobs[:2]] == [("h", "h"), ("e", "h")]
    assert (last.response.usage, last.response.status) == (whole.usage, "incomplete")
    async with client.responses.stream(**ASKED | {"max_output_tokens": 30}) as stream:
        assert (await stream.get_final_response()).output_text == "hello"


async def test_what_goes_wrong_in_mid_stream_is_an_event(client: openai.AsyncOpenAI, engine: ScriptedEngine) -> None:
    engine.fault, engine.fault_after = PeerUnavailable("nobody serves stage 1"), 2
    events = [event async for event in await client.responses.create(**ASKED, stream=True)]
    assert (events[-1].type, events[-1].sequence_number) == ("error", len(events) - 1)
    assert events[-1].message == "nobody serves stage 1"
    engine.fault_after = 0
    with pytest.raises(openai.InternalServerError, match="nobody serves stage 1"):
        await client.responses.create(**ASKED, stream=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input", []),
        ("input", 5),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]),
        ("input", [{"type": "function_call_output", "call_id": "1", "output": "x"}]),
        ("input", "x" * 100),
        ("max_output_tokens", 0),
        ("max_output_tokens", 99),
        ("max_tokens", 5),
        ("n", 2),
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("background", True),
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", "required"),
        ("include", ["reasoning.encrypted_content"]),
        ("top_logprobs", 3),
        ("reasoning", {"effort": "high"}),
        ("text", {"format": {"type": "json_object"}}),
        ("truncation", "auto"),
        ("prompt", {"id": "pmpt_1"}),
        ("model", "gpt-4"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    client: openai.AsyncOpenAI, engine: ScriptedEngine, name: str, value: Any
) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as found:
        await client.responses.create(**ASKED | {"extra_body": {name: value}})
    assert found.value.param == name
    assert engine.asked == []


async def test_what_changes_nothing_is_taken(client: openai.AsyncOpenAI) -> None:
    inert = {
        "store": True, "truncation": "disabled", "text": {"format": {"type": "text"}}, "tools": [], "background": False,
        "reasoning": {"effort": None}, "parallel_tool_calls": True, "previous_response_id": None, "include": [],
        "service_tier": "auto", "tool_choice": "auto", "max_tool_calls": 3,
    }  # fmt: skip
    assert (await client.responses.create(**ASKED, extra_body=inert)).output_text == "hello"
