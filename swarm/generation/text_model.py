"""A model for text: the engine that computes it, its tokenizer and its chat template."""

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
from swarm.generation.sampling import Sampling, Scores
from swarm.generation.text import Writing

TURN_SECONDS = 30.0
"""How long a conversation waits until those before it are rendered."""


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A model with its tokenizer.

    Attributes:
        run: the run's id.
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
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        stops: Sequence[str] = (),
        *,
        with_special: bool = False,
        echoes: bool = False,
        scores: Scores | None = None,
    ) -> AsyncIterator[Writing]:
        """Continue a prompt inside the block. At the block's end, what the engine keeps for the text is freed.

        Args:
            with_special: whether special tokens are part of the text.
            echoes: whether the text begins with the prompt.
            scores: see Engine.generate.

        Raises:
            ValueError, SwarmError: as Engine.generate does; they come with the first piece.
        """
        async with aclosing(self.engine.generate(prompt, sampling, max_tokens, scores)) as tokens:
            yield Writing(
                tokens,
                self.tokenizer,
                prompt=prompt,
                end_tokens=self.end_tokens,
                stops=stops,
                with_special=with_special,
                echoes=echoes,
            )

    async def conversation(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of the prompt for the assistant's next answer. Cancellation ends the template's process.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
            Overloaded: other conversations come before this one, and take long.
        """
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
        config: the run's configuration.
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
