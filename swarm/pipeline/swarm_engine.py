"""Text from a running swarm: an engine whose model is spread over the swarm's peers. Holds no parameters."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from swarm.config import RunConfig
from swarm.errors import PeerUnavailable, RoundGone
from swarm.generation.engine import num_chosen, require_room
from swarm.generation.sampling import Sampling, Scores
from swarm.hop.continuation import Continuation
from swarm.hop.hop import Hop
from swarm.hop.session import Order, Token, pieces_of

logger = logging.getLogger(__name__)


class SwarmEngine:
    """Writes text with a run's stages, whichever peers serve them. The round is that whose weights write the newest
    text, and before the first text `round_number`."""

    def __init__(self, hop: Hop, config: RunConfig, *, round_number: int | None = None, path: int = 0) -> None:
        """`hop` leads to the path's first block. Raises ValueError if the run's model cannot generate text."""
        if config.model.custom_class:
            raise ValueError("no text from a run with model.custom_class: such a model has no cache")
        self.round = round_number
        self._hop = hop
        self._path = path
        self._vocab_size = config.model.vocab_size
        self.longest = config.model.max_positions or config.data.sequence_length

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int, scores: Scores | None = None
    ) -> AsyncGenerator[int, None]:
        """Write text as Engine.generate does, with the weights of one round, while training goes on.

        If no peer holds these any more, the text goes on with the newest ones, and the log says so. Raises what
        Engine.generate does, also for a token that is not in the vocabulary, Overloaded if the swarm has no room for
        one more session, and SwarmError if a stage has no peer, or too many failed.
        """
        require_room(self, prompt, max_tokens)
        if not all(0 <= token < self._vocab_size for token in prompt):
            raise ValueError(f"a token of the prompt is outside the vocabulary of {self._vocab_size}")
        tokens = list(prompt)
        num_left = num_chosen(max_tokens, scores)
        order = Order(
            sampling=sampling,
            num_positions=len(prompt) + max_tokens,
            vocab_size=self._vocab_size,
            path=self._path,
            scoring=None if scores is None else scores.scoring,
        )
        while num_left:
            session, num_before = _Session(self._hop.continuation(order), tokens, num_left), len(tokens)
            try:
                async with aclosing(session.tokens()) as stream:
                    async for heard in stream:
                        if len(tokens) == num_before:
                            self.round = session.round
                        if scores is not None:
                            _add(scores, heard)
                        tokens.append(heard.token)
                        num_left -= 1
                        if max_tokens:
                            yield heard.token
            except RoundGone as error:
                logger.warning("the text goes on with the newest weights: %s", error)


def _add(scores: Scores, heard: Token) -> None:
    """Add the scores that came with a token, without those that are there already. Raises PeerUnavailable."""
    num_missing = heard.position + 1 - scores.scoring.first - len(scores)
    if heard.scores is None or len(heard.scores) < num_missing:
        raise PeerUnavailable(f"{num_missing} scores are missing from what a peer of the last stage sent")
    scores.extend_from(heard.scores, num_missing)


class _Session:
    def __init__(self, continuation: Continuation, tokens: Sequence[int], max_tokens: int) -> None:
        self._continuation = continuation
        self._tokens = tuple(tokens)
        # The queue has room for all tokens, and for the None that marks their end.
        self._heard: asyncio.Queue[Token | None] = asyncio.Queue(max_tokens + 1)

    @property
    def round(self) -> int | None:
        """The round whose weights stage 0 uses; None until it has said so."""
        return next(iter(self._continuation.rounds), None)

    async def tokens(self) -> AsyncGenerator[Token, None]:
        """Yield the tokens that follow the prompt. Closing the iterator ends the session at all stages."""
        # A task group would cancel the caller between two tokens. Instead this task is always ended below.
        running = asyncio.create_task(self._run())
        try:
            while (heard := await self._heard.get()) is not None:
                yield heard
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def _run(self) -> None:
        try:
            pieces = pieces_of(self._tokens)
            for number, piece in enumerate(pieces, start=1):
                await self._continuation.push(piece, sample=number == len(pieces))
            await self._continuation.run(self._heard.put)
        finally:
            self._heard.put_nowait(None)
