"""A scripted model behind the routes, for clients in the same process."""

import json
import random
from typing import Any

import httpx2

from swarm.generation.openai_api.app import Api
from swarm.generation.openai_api.gate import Gate
from swarm.generation.text_model import TextModel
from tests.support.manual_clock import ManualClock
from tests.support.scripted_model import RUN, ScriptedEngine, scripted_model

COMPLETION = {"model": RUN, "prompt": "say", "max_tokens": 5}
CHAT = {"model": RUN, "messages": [{"role": "user", "content": "say"}], "max_tokens": 5}
BODIES = {"completions": COMPLETION, "chat/completions": CHAT}


def client_of(
    engine: ScriptedEngine, *, template: str | None = "{{ messages[0].content }}", model: TextModel | None = None,
    most_requests: int = 4,
) -> httpx2.AsyncClient:  # fmt: skip
    model = model or scripted_model(engine, template=template)
    api = Api(model, default_tokens=30, clock=ManualClock(1000.0), numbers=random.Random(0))
    gate = Gate(api.app(), token=None, most_requests=most_requests)
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(gate), base_url="http://server/v1")


def events_of(response: httpx2.Response) -> list[Any]:
    """The events of a stream, without the word that ends it."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last, end = response.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]
