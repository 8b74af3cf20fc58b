"""A model that people talk to: what computes it, what its tokens mean, and how a conversation is put to it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from swarm.config import RunConfig
from swarm.data import chat
from swarm.data.chat import ChatTemplate, Message
from swarm.data.end_tokens import end_tokens
from swarm.data.tokenizers import Tokenizer
from swarm.errors import Overloaded
from swarm.generation.engine import Engine
from swarm.generation.sampling import Sampling
from swarm.generation.text import Writing

TURN_SECONDS = 30.0
"""How long a conversation waits until those before it have been rendered."""


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A model with its tokenizer.

    Attributes:
        run: the run's id.
        end_tokens: the tokens with which a text ends.
        template: of conversations, if the model has one.
    """

    run: str
    engine: Engine
    tokenizer: Tokenizer
    end_tokens: frozenset[int]
    template: ChatTemplate | None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Of rendering a conversation."""

    @property
    def name(self) -> str:
        """Run and round of the weights with which a text that begins now is written; the run alone, if that is all."""
        return self.run if self.engine.round is None else f"{self.run}@{self.engine.round}"

    @asynccontextmanager
    async def continued(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int, stops: Sequence[str] = ()
    ) -> AsyncIterator[Writing]:
        """Continue a prompt inside the block; leaving it gives up what is kept for it.

        Raises:
            ValueError, SwarmError: as Engine.generate does; they come with the first piece.
        """
        async with aclosing(self.engine.generate(prompt, sampling, max_tokens)) as tokens:
            yield Writing(tokens, self.tokenizer, prompt=prompt, end_tokens=self.end_tokens, stops=stops)

    async def conversation(self, messages: Sequence[Message]) -> list[int]:
        """The tokens after which the assistant's answer comes. Cancellation ends what computes them.

        Raises:
            ValueError: the model has no chat template, or it refuses the messages.
            Overloaded: others are before it, whose conversations take long.
        """
        template = self.template
        if template is None:
            raise ValueError("the model has no chat template, so that it takes prompts and no conversations")
        try:
            async with asyncio.timeout(TURN_SECONDS):
                # Here, and not in threads, of which all that encode texts would soon be waiting.
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
        return await asyncio.to_thread(self.encode, text)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. Blocks. Raises ValueError for one that has none."""
        tokens: list[int] = self.tokenizer.encode(text).tolist()
        return tokens


def read_text_model(
    config: RunConfig, engine: Engine, tokenizer: Tokenizer, *, folders: Sequence[Path], now: Callable[[], datetime]
) -> TextModel:
    """A model whose configuration and folders tell how its texts end, and how conversations are put to it.

    Args:
        config: the run's.
        folders: of its tokenizer and configuration, as transformers writes them. The first template is taken.
        now: local time, for templates that tell the model the date.

    Raises:
        ValueError: one line, if a file makes no sense.
    """
    templates = (chat.load(folder, now=now) for folder in folders)
    return TextModel(
        run=config.run_id,
        engine=engine,
        tokenizer=tokenizer,
        end_tokens=end_tokens(config.model, folders, tokenizer),
        template=next((template for template in templates if template is not None), None),
    )
