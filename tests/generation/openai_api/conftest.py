from collections.abc import AsyncIterator

import httpx2
import pytest

from tests.generation.openai_api.served import client_of
from tests.support.scripted_model import ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(engine) as client:
        yield client
