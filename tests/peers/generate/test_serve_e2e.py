"""swarm-generate --serve with real clients: openai's, many at once, and some that misbehave."""

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from transformers import AutoModelForCausalLM, AutoTokenizer

from peers.commands import command_line
from peers.local.supervisor import Supervisor
from tests.support import preloaded
from tests.support.chat_model import LONGEST, save_chat_model
from tests.support.swarm import wait_until, whole_lines

TOKEN = "s3cret"
SECONDS = 60.0

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """Start a server, and yield its address. At the end Ctrl-C ends it, without an error."""
    arguments = ["--model", str(folder), "--serve", "0", "--threads", "1", "--max-sequences", "4"]
    with Supervisor(folder.parent / "logs", grace_seconds=0.0, spawn=preloaded.spawn) as children:
        command = command_line("generate", arguments)
        server = children.start("server", command, environment={"SWARM_SERVE_TOKEN": TOKEN})
        wait_until(lambda: len(whole_lines(server.log)) == 2, 60.0, f"the server's address; see {server.log}")
        told = server.log.read_text()
        found = re.search(r"http://\S+", told)
        assert found is not None, told
        yield found[0]
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: [exit_.returncode for exit_ in children.exits()] == [0], 10.0, "the server to end")
        assert server.log.read_text() == told


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0, timeout=SECONDS) as client:
        yield client


MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "word1 word2"}]


def test_the_client_gets_what_transformers_writes(client: openai.OpenAI, folder: Path) -> None:
    model, plain = client.models.list().data
    assert plain.id == model.id.removesuffix("@0")
    assert re.fullmatch(rf"{folder.name}\.[0-9a-f]{{16}}@0", model.id)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    written = theirs.generate(prompt, max_new_tokens=30, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :]
    expected = tokenizer.decode(written, skip_special_tokens=True)

    chat = client.chat.completions.create(model=model.id, messages=MESSAGES, temperature=0, max_tokens=30)
    assert chat.choices[0].message.content == expected
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == prompt.shape[1]
    assert chat.usage.completion_tokens == len(written)

    stream = client.chat.completions.create(
        model=model.id,
        messages=MESSAGES,
        temperature=0,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage == chat.usage
    assert chunks[-2].choices[0].finish_reason == chat.choices[0].finish_reason

    text = client.completions.create(model=model.id, prompt="word5", max_tokens=8, seed=3)
    again = client.completions.create(model=model.id, prompt="word5", max_tokens=8, seed=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in again) == text.choices[0].text
    assert text.choices[0].finish_reason in ("stop", "length")


def test_what_is_refused_comes_as_the_client_s_own_errors(client: openai.OpenAI, url: str) -> None:
    model = client.models.list().data[0].id
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError, match="there is no such model here"):
        client.completions.create(model="gpt-4", prompt="word1")
    with pytest.raises(openai.BadRequestError, match=f"the model takes {LONGEST} tokens") as refused:
        client.completions.create(model=model, prompt="word1 " * LONGEST)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="grammar is not known here"):
        client.completions.create(model=model, prompt="word1", extra_body={"grammar": "root"})


async def test_fifty_clients_are_served_and_those_that_hang_up_are_forgotten(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0, timeout=SECONDS) as client:
        model = (await client.models.list()).data[0].id

        async def ask(number: int) -> str:
            answer = await client.completions.create(model=model, prompt=f"word{number}", max_tokens=5, temperature=0)
            return str(answer.choices[0].text)

        alone = [await ask(number) for number in range(3)]
        results = await asyncio.gather(*(ask(number) for number in range(50)), return_exceptions=True)
        assert results[:3] == alone
        assert all(isinstance(result, str | openai.RateLimitError) for result in results)
        assert sum(isinstance(result, str) for result in results) >= 4

        # These requests take all places, and more wait.
        streams = await asyncio.gather(
            *(
                client.completions.create(model=model, prompt="word1", max_tokens=LONGEST - 1, stream=True, seed=number)
                for number in range(4)
            )
        )
        waiting = [asyncio.create_task(ask(0)) for _ in range(5)]
        for stream in streams:
            await stream.close()
        waiting.pop().cancel()
        began = time.monotonic()
        assert await asyncio.gather(*waiting) == [alone[0]] * 4
        assert time.monotonic() - began < 2.0
