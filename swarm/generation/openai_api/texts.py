"""The texts of one request, which are written side by side.

The pieces of all of them come through one bounded queue, so that a client that reads slowly holds up the writing.
Leaving the block ends all texts and frees what engines keep for them.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from swarm.data.tokenizers import Tokenizer
from swarm.generation.openai_api.answers import Scored
from swarm.generation.sampling import Sampling, Scores
from swarm.generation.text_model import TextModel, Writing

_MOST_AT_ONCE = 8
"""The most texts of one request that are written at once, so that others have their turn."""
_MOST_PIECES = 4
"""The most pieces that wait for a client."""


@dataclass(eq=False, kw_only=True)
class Text:
    """One text: what it continues, how, and how far it is.

    Attributes:
        index: its number in the request.
        scores: of its tokens; None if they are not wanted.
        writing: None until it begins.
        said: the pieces so far.
    """

    index: int
    prompt: Sequence[int]
    sampling: Sampling
    max_tokens: int
    echoes: bool = False
    scores: Scores | None = None
    writing: Writing | None = None
    said: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return 0 if self.writing is None else self.writing.num_tokens

    @property
    def finish_reason(self) -> str:
        return "length" if self.writing is None else self.writing.finish_reason

    def scored(self, tokenizer: Tokenizer, first: int = 0, last: int | None = None) -> list[Scored]:
        """The tokens of the text from one number to another with their scores; none if these are not wanted."""
        if self.scores is None or self.writing is None:
            return []
        before, found = 0 if self.echoes else len(self.prompt), list[Scored]()
        tokens, offsets = self.writing.tokens[first:last], self.writing.offsets[first:last]
        for number, (token, offset) in enumerate(zip(tokens, offsets, strict=True), start=first):
            logprob, top = self.scores.at(before + number) or (None, ())
            likeliest = [(tokenizer.bytes_of(likely), theirs) for likely, theirs in top]
            found.append(Scored(tokenizer.bytes_of(token), offset, logprob, likeliest))
        return found


Piece = tuple[Text, str | None, int, int]
"""A piece of a text, or None once the text has ended, and where its tokens begin and end among the text's tokens."""


class Pieces:
    def __init__(self) -> None:
        self._queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(_MOST_PIECES)

    async def next(self) -> Piece | None:
        """Wait for the next piece; None once all texts have ended. Raises what a text failed with."""
        if isinstance(item := await self._queue.get(), Exception):
            raise item
        return item

    async def write(self, model: TextModel, texts: Sequence[Text], *, stops: Sequence[str], with_special: bool) -> None:
        """Write the texts. If one fails, the others end, and `next` raises its error."""
        room = asyncio.Semaphore(_MOST_AT_ONCE)

        async def write(text: Text) -> None:
            async with (
                room,
                model.continued(
                    text.prompt, text.sampling, text.max_tokens, stops,
                    with_special=with_special, echoes=text.echoes, scores=text.scores,
                ) as text.writing,
                aclosing(text.writing.pieces()) as pieces,
            ):  # fmt: skip
                first, tokens = 0, text.writing.tokens
                async for piece in pieces:
                    text.said.append(piece)
                    await self._queue.put((text, piece, first, len(tokens)))
                    first = len(tokens)
            await self._queue.put((text, None, first, len(tokens)))

        try:
            async with asyncio.TaskGroup() as tasks:
                for text in texts:
                    tasks.create_task(write(text))
        except ExceptionGroup as group:
            await self._queue.put(group.exceptions[0])
        else:
            await self._queue.put(None)


@asynccontextmanager
async def written(
    model: TextModel, texts: Sequence[Text], *, stops: Sequence[str], with_special: bool
) -> AsyncIterator[Pieces]:
    pieces = Pieces()
    # A task group around the block would cancel the block when a text fails. Instead the task is always ended below.
    writing = asyncio.create_task(pieces.write(model, texts, stops=stops, with_special=with_special))
    try:
        yield pieces
    finally:
        writing.cancel()
        await asyncio.wait([writing])
