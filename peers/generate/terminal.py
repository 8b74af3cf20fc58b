"""Prints text as the model writes it: what continues a prompt, or the answers of a conversation.

In a conversation a line of the terminal, or of a pipe, is a message. Ctrl-C ends its answer, and not the conversation.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from peers.generate.options import PROG, GenerateOptions
from peers.shared import stopping
from peers.shared.process import EXIT_FAILURE, EXIT_TERMINATED
from swarm.errors import SwarmError
from swarm.generation.text_model import TextModel
from swarm.machine.background import begun
from swarm.machine.words import counted, printable

Result = TypeVar("Result")

HELP = "/reset begins anew, /exit ends, and Ctrl-C stops an answer"
_MARK = "> "
_READ_BYTES = 1 << 16


async def write(model: TextModel, options: GenerateOptions) -> None:
    """Print the prompt, its continuation as it is written, and then how fast that was and which model wrote it. Raises
    ValueError if the prompt is too long."""
    assert options.prompt is not None
    longest, prompt = model.engine.longest, model.encode(options.prompt)
    max_tokens = min(options.most_tokens, longest - len(prompt))
    if max_tokens < 1:
        has = counted(len(prompt), "token")
        raise ValueError(f"--prompt has {has}, and the model takes {longest} with what follows")
    tell_of_cut(options, max_tokens, longest)
    say(options.prompt)
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    try:
        async with model.continued(prompt, options.sampling, max_tokens, options.stop) as text:
            async for piece in text.pieces():
                say(piece)
    finally:
        # The end of the line is also printed if the text breaks off, so that the error begins on a new line.
        say("\n")
    seconds = loop.time() - began_at
    tell(f"{counted(text.num_tokens, 'token')} by {model.name}, {text.num_tokens / seconds:.1f} a second")


def tell_of_cut(options: GenerateOptions, max_tokens: int, longest: int) -> None:
    """Say so if fewer tokens will be written than --max-tokens asks for, since the model takes `longest` in all."""
    if (options.max_tokens or 0) > max_tokens:
        tell(
            f"--max-tokens {options.max_tokens} is more than fits: at most {counted(max_tokens, 'token')} will be "
            f"written, since the model takes {longest} with the prompt"
        )


def say(text: str) -> None:
    """Print at once. On a terminal, leave out control characters, because a terminal takes them for commands."""
    sys.stdout.write(printable(text, keep="\n\t") if sys.stdout.isatty() else text)
    sys.stdout.flush()


def tell(text: str) -> None:
    print(f"{PROG}: {text}", file=sys.stderr, flush=True)


class Keyboard:
    def __init__(self) -> None:
        self.is_over = False
        """Whether the program is to end because SIGTERM came."""
        self._interrupt = asyncio.Event()
        self._read_ahead = b""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt.set)
        loop.add_signal_handler(signal.SIGTERM, self._end)

    async def line(self) -> str | None:
        """The next line without its end; None if there are no more, or Ctrl-C came before it."""
        return await self.before_interrupt(self._next_line())

    async def before_interrupt(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Run `work` and return its result. If Ctrl-C or SIGTERM comes first, cancel `work`, wait for its end, and
        return None."""
        self._interrupt.clear()
        if self.is_over:
            self._interrupt.set()
        return await stopping.before(self._interrupt.wait(), work)

    def _end(self) -> None:
        self.is_over = True
        self._interrupt.set()

    async def _next_line(self) -> str | None:
        # The thread may wait for ever.
        return await asyncio.wrap_future(begun(self._read_line, "keyboard"))

    def _read_line(self) -> str | None:
        """Read the next line; blocks. This reads the descriptor, because a process cannot end while a thread holds the
        lock of Python's buffer."""
        while b"\n" not in self._read_ahead and (piece := os.read(sys.stdin.fileno(), _READ_BYTES)):
            self._read_ahead += piece
        line, mark, self._read_ahead = self._read_ahead.partition(b"\n")
        return line.decode(errors="replace") if line or mark else None


class Conversation:
    def __init__(self, model: TextModel, options: GenerateOptions) -> None:
        """Raise ValueError if the model has no chat template."""
        if model.template is None:
            raise ValueError("--chat needs a model with a chat template, and this one has none: use --prompt TEXT")
        self._model = model
        self._options = options
        self._beginning = [{"role": "system", "content": options.system}] if options.system else []
        self._messages = self._beginning

    async def require_beginning(self) -> None:
        """Raise ValueError if the chat template refuses any first message, for example because of --system."""
        await self._model.conversation([*self._beginning, {"role": "user", "content": "Hello"}])

    def reset(self) -> None:
        """Forget all messages except --system's."""
        self._messages = self._beginning

    async def answer(self, text: str) -> None:
        """Print the answer to a message as it comes. If cancelled, the conversation goes on from what was printed.

        Raises:
            ValueError: the template refuses the message, or the conversation is too long. The conversation is then as
                it was before the message.
            SwarmError: there is no answer, or it broke off.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = await self._model.conversation(messages)
        longest = self._model.engine.longest
        if len(prompt) >= longest:
            raise ValueError(
                f"the conversation has {counted(len(prompt), 'token')}, and the model takes {longest} with the answer: "
                "/reset begins anew"
            )
        max_tokens = min(self._options.most_tokens, longest - len(prompt))
        if len(messages) == len(self._beginning) + 1:
            tell_of_cut(self._options, max_tokens, longest)
        said = ""
        try:
            async with self._model.continued(prompt, self._options.sampling, max_tokens, self._options.stop) as answer:
                async for piece in answer.pieces():
                    say(piece)
                    said += piece
        finally:
            say("\n")
            self._messages = [*messages, {"role": "assistant", "content": said}]


async def talk(model: TextModel, options: GenerateOptions) -> int:
    """Answer the lines of stdin until there are no more. Returns the exit code: EXIT_TERMINATED after SIGTERM, and
    EXIT_FAILURE if an answer failed while stdin was a pipe, since nobody may have seen that. Raises ValueError if the
    model has no chat template, or none with which a conversation can begin."""
    conversation, keyboard, is_terminal = Conversation(model, options), Keyboard(), sys.stdin.isatty()
    await keyboard.before_interrupt(conversation.require_beginning())
    exit_code = 0
    if is_terminal:
        print(f"{model.name}: {HELP}", file=sys.stderr)
    while not keyboard.is_over:
        if is_terminal:
            say(_MARK)
        line = await keyboard.line()
        if line is None or line.strip() == "/exit":
            break
        if line.strip() == "/reset":
            conversation.reset()
        elif line.strip():
            try:
                await keyboard.before_interrupt(conversation.answer(line.strip()))
            except (ValueError, SwarmError) as error:
                print(f"{PROG}: error: {printable(str(error))}", file=sys.stderr)
                exit_code = 0 if is_terminal else EXIT_FAILURE
    return EXIT_TERMINATED if keyboard.is_over else exit_code
