"""A model for text: its engine, tokenizer and chat template; tokens become text as they come, and it is found where the
text ends.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from swarm.config import RunConfig
from swarm.data import chat
from swarm.data.chat import ChatTemplate, Message
from swarm.data.tokenizers import Tokenizer, end_tokens
from swarm.errors import Overloaded
from swarm.generation.engine import Engine
from swarm.generation.sampling import Sampling, Scores

_HALF = "\N{REPLACEMENT CHARACTER}"
"""The decoder's stand-in for bytes of a character whose other bytes are still to come."""

_CONTEXT_TOKENS = 8
"""How many tokens at a prompt's end may affect the text of the first token after it."""
_MOST_HALF_TOKENS = 3
"""The most tokens with which a character may have begun without being whole: it has at most four bytes."""
TURN_SECONDS = 30.0
"""How long a conversation waits until those before it are rendered."""


class TextStream:
    """Turns tokens into text one by one. A character that consists of several tokens comes with the last of them."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, with_special: bool = False) -> None:
        """`prompt` has the tokens before the first that is pushed. Their text is not returned. `with_special` says
        whether special tokens, such as the end of a turn, are part of the text."""
        self._tokenizer = tokenizer
        self._with_special = with_special
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._context, self._said = 0, len(self._tokens)
        """The text of all tokens before `_said` was returned. The tokens from `_context` to `_said` are decoded again
        together with later ones, because they may decide whether a word has a space before it."""

    def push(self, token: int) -> str:
        """The text that one more token adds; empty if the token ends within a character."""
        self._tokens.append(token)
        end = len(self._tokens)
        if self._decoded(end).endswith(_HALF):
            # What began earlier is no character any more, and will not become one.
            end -= _MOST_HALF_TOKENS
        return self._say(end) if end > self._said else ""

    def rest(self) -> str:
        return self._say(len(self._tokens)).rstrip(_HALF)

    def _say(self, end: int) -> str:
        before, text = self._decoded(self._said), self._decoded(end)
        self._context, self._said = self._said, end
        return text[len(before) :]

    def _decoded(self, end: int) -> str:
        return self._tokenizer.decode(self._tokens[self._context : end], with_special=self._with_special)


class Writing:
    """A text as it is written, up to an end token or the first stop string, neither of which is part of it.

    Attributes:
        num_tokens: the number of tokens that were read, an end token included.
        tokens: these tokens, after those of the prompt if the text begins with it.
        offsets: for each of these, how many characters the text before it has.
        finish_reason: once the text has ended: `stop` if an end token or a stop string came, `length` if no tokens
            were left.
    """

    def __init__(
        self, tokens: AsyncIterator[int], tokenizer: Tokenizer, *, prompt: Sequence[int] = (),
        end_tokens: Collection[int] = (), stops: Sequence[str] = (), with_special: bool = False, echoes: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            tokens: the caller closes this iterator.
            with_special: see TextStream.
            echoes: whether the text begins with the prompt, in which neither end tokens nor stops are looked for.
        """
        self.num_tokens = 0
        self.tokens: list[int] = []
        self.offsets: list[int] = []
        self.finish_reason: Literal["stop", "length"] = "length"
        self._next_tokens = tokens
        self._echoed = prompt if echoes else ()
        self._stream = TextStream(tokenizer, () if echoes else prompt, with_special=with_special)
        self._num_characters = 0
        self._end_tokens = end_tokens
        self._stops = stops

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Yield the text piece by piece. If the end of a piece may be the beginning of a stop string, that end is held
        back until more tokens come."""
        said = held = ""
        if self._echoed:
            said = await asyncio.to_thread(lambda: "".join(map(self._push, self._echoed)))
        async for token in self._next_tokens:
            self.num_tokens += 1
            if token in self._end_tokens:
                self._note(token)
                self.finish_reason = "stop"
                break
            held += self._push(token)
            if any(stop in held for stop in self._stops):
                break
            keep = _may_begin(held, self._stops)
            if len(held) > keep:
                yield said + held[: len(held) - keep]
                said, held = "", held[len(held) - keep :]
        held += self._stream.rest()
        if found := [held.index(stop) for stop in self._stops if stop in held]:
            self.finish_reason, held = "stop", held[: min(found)]
        if said or held:
            yield said + held

    def _push(self, token: int) -> str:
        self._note(token)
        text = self._stream.push(token)
        self._num_characters += len(text)
        return text

    def _note(self, token: int) -> None:
        self.tokens.append(token)
        self.offsets.append(self._num_characters)


def _may_begin(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text are the beginning of one of these strings; 0 if none are."""
    lengths = [length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])]
    return max(lengths, default=0)


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A model with its tokenizer.

    Attributes:
        end_tokens: the tokens with which a text ends.
        template: renders conversations; None if the model has no chat template.
    """

    run: str
    engine: Engine
    tokenizer: Tokenizer
    end_tokens: frozenset[int]
    template: ChatTemplate | None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held while a conversation is rendered."""

    @property
    def name(self) -> str:
        """RUN@ROUND, with the round of the weights for a text that begins now; RUN if the round is not known."""
        return self.run if self.engine.round is None else f"{self.run}@{self.engine.round}"

    @asynccontextmanager
    async def continued(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int, stops: Sequence[str] = (), *,
        with_special: bool = False, echoes: bool = False, scores: Scores | None = None,
    ) -> AsyncIterator[Writing]:  # fmt: skip
        """Continue a prompt inside the block. At the block's end, what the engine keeps for the text is freed. For
        `scores` see Engine.generate. Raises ValueError and SwarmError as Engine.generate does; they come with the first
        piece."""
        async with aclosing(self.engine.generate(prompt, sampling, max_tokens, scores)) as tokens:
            yield Writing(
                tokens, self.tokenizer, prompt=prompt, end_tokens=self.end_tokens, stops=stops,
                with_special=with_special, echoes=echoes,
            )  # fmt: skip

    async def conversation(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of the prompt for the assistant's next answer. Cancellation ends the template's process. Raises
        ValueError if the model has no chat template, or the template refuses the messages, and Overloaded if other
        conversations come before this one, and take long."""
        template = self.template
        if template is None:
            raise ValueError("the model has no chat template, so that it takes prompts and no conversations")
        try:
            async with asyncio.timeout(TURN_SECONDS):
                # Wait here, not in a worker thread: otherwise all threads that encode texts could soon be waiting.
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded("other conversations take long", retry_after_seconds=TURN_SECONDS) from None
        try:
            text = await asyncio.to_thread(template.render, messages, add_generation_prompt=True)
        except asyncio.CancelledError:
            template.close()
            raise
        finally:
            self._turn.release()
        # The template has written what the tokenizer would put before a text.
        tokens: list[int] = (await asyncio.to_thread(self.tokenizer.encode, text)).tolist()
        return tokens

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer puts before it. Blocks.

        Raises ValueError for a text that the tokenizer cannot encode.
        """
        tokens: list[int] = [*self.tokenizer.prefix.tolist(), *self.tokenizer.encode(text).tolist()]
        return tokens


def read_text_model(
    config: RunConfig, engine: Engine, tokenizer: Tokenizer, *, folders: Sequence[Path], now: Callable[[], datetime]
) -> TextModel:
    """Make a text model, with the end tokens and the chat template that its configuration and folders have.

    Args:
        folders: of the tokenizer and the model, as transformers writes them. The first chat template is taken.
        now: gives the local time, for templates that write the date for the model.

    Raises:
        ValueError: one line, if a file makes no sense.
    """
    templates = (chat.load(folder, now=now) for folder in folders)
    return TextModel(
        run=config.run_id,
        engine=engine,
        tokenizer=tokenizer,
        end_tokens=end_tokens(config.model, folders, tokenizer, format=config.data.format),
        template=next((template for template in templates if template is not None), None),
    )
