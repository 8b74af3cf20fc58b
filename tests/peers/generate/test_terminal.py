"""swarm-generate --chat: a conversation, line by line."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from peers.generate import terminal
from peers.generate.options import GenerateOptions
from peers.shared.process import EXIT_FAILURE, EXIT_TERMINATED
from swarm.errors import PeerUnavailable
from tests.support.scripted_model import ScriptedEngine, scripted_model


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Make stdin a pipe, and return the end to write into."""
    read, write = os.pipe()
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield write
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _options(**more: Any) -> GenerateOptions:
    return GenerateOptions(**{"model": "m", "chat": True, "max_tokens": 5, **more})


def _type(typed: int, text: str, *, is_all: bool = True) -> None:
    os.write(typed, text.encode())
    if is_all:
        os.close(typed)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)


async def test_messages_are_answered_with_what_was_said_before(typed: int, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine()
    _type(typed, "hi\n\n  you \r\n/reset\nthird")
    assert await terminal.talk(scripted_model(engine), _options(system="be")) == 0
    assert capsys.readouterr().out == "hello\nhello\nhello\n"
    assert [prompt.decode() for prompt, _, _ in engine.asked] == [
        "<system>be<user>hi<assistant>",
        "<system>be<user>hi<assistant>hello<user>you<assistant>",
        "<system>be<user>third<assistant>",
    ]


async def test_an_interrupt_stops_an_answer_and_another_one_the_program(
    typed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine()
    talking = asyncio.create_task(terminal.talk(scripted_model(engine), _options(max_tokens=50)))
    engine.may_go_on.clear()
    _type(typed, "hi\n", is_all=False)
    await _until(lambda: engine.under_way == 1)
    os.kill(os.getpid(), signal.SIGINT)
    await _until(lambda: engine.under_way == 0)
    engine.may_go_on.set()
    _type(typed, "again\n", is_all=False)
    await _until(lambda: len(engine.asked) == 2 and engine.under_way == 0)
    assert engine.asked[1][0] == b"<user>hi<assistant><user>again<assistant>"
    # One that comes before the program waits for the next line is taken for the answer that has just ended.
    while not talking.done():
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.01)
    assert await talking == 0
    os.close(typed)
    assert capsys.readouterr().out == "\n" + "hello" * 10 + "\n"


async def test_sigterm_ends_it_in_mid_answer(typed: int) -> None:
    engine = ScriptedEngine()
    engine.may_go_on.clear()
    talking = asyncio.create_task(terminal.talk(scripted_model(engine), _options()))
    _type(typed, "hi\nthere\n", is_all=False)
    await _until(lambda: engine.under_way == 1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await talking == EXIT_TERMINATED
    os.close(typed)
    assert len(engine.asked) == 1
    assert engine.under_way == 0


async def test_a_line_that_cannot_be_read_is_an_error_and_not_awaited_for_ever(
    typed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with os.fdopen(typed, "w") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(OSError, match="Bad file descriptor"):
            await terminal.talk(scripted_model(ScriptedEngine()), _options())


async def test_what_cannot_be_answered_is_a_line(typed: int, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine(longest=60)
    engine.fault, engine.fault_after = PeerUnavailable("stage 1 has no peer"), 2
    _type(typed, "hi\n" + "x" * 70 + "\nhi\n")
    assert await terminal.talk(scripted_model(engine), _options()) == EXIT_FAILURE
    said = capsys.readouterr()
    assert said.out == "he\nhe\n"
    assert said.err.splitlines() == [
        "swarm-generate: error: stage 1 has no peer",
        "swarm-generate: error: the conversation has 108 tokens, and the model takes 60 with the answer: /reset begins "
        "anew",
        "swarm-generate: error: stage 1 has no peer",
    ]
