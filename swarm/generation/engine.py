"""The interface of engines, which compute the next tokens of sequences, and LocalEngine, which has the model in this
process.

Another engine is pipeline/swarm_engine.py, for a running swarm. RoutedEngine chooses among several.
"""

import asyncio
import dataclasses
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

import torch

from swarm.data.path_router import NUM_TOKENS
from swarm.generation.decoding import NO_SCORING, Decoding, NextPositions, Scorer, choose
from swarm.generation.sampling import Sampling, Scores
from swarm.machine.recording import Recorder
from swarm.machine.words import counted
from swarm.model.cache import KeyValueCache
from swarm.model.stages import Transformer

_MOST_AHEAD = 4
"""The most tokens that are computed before the caller takes them. A sequence with that many is left out, so a slow
caller does not delay the others."""


class Engine(Protocol):
    @property
    def longest(self) -> int: ...

    @property
    def round(self) -> int | None:
        """The round of the weights that continue the newest sequence, or one that begins now; None if not known."""

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int, scores: Scores | None = None
    ) -> AsyncGenerator[int, None]:
        """Continue a prompt of at least one token, token by token, until the caller stops or `max_tokens` are computed.

        Closing the iterator frees what is kept for the sequence.

        Args:
            max_tokens: with 0, only the prompt is scored.
            scores: gets a token's scores before that token comes, and may be ahead of the caller.

        Raises:
            ValueError: the prompt is empty, or together with `max_tokens` longer than `longest`.
            SwarmError: the sequence cannot be continued, now or at all.
        """


class Room:
    """Room for a few sequences. If there is too little room for one, that one and all later ones wait, in order."""

    def __init__(self, num_sequences: int, capacity: int) -> None:
        """`capacity` is the most positions, of all sequences together."""
        self.capacity = capacity
        self._sequences_left = num_sequences
        self._positions_left = capacity
        self._turn = asyncio.Lock()
        self._given_back = asyncio.Event()

    @asynccontextmanager
    async def taken(self, num_positions: int) -> AsyncIterator[None]:
        """Wait for room for a sequence of `num_positions` positions, and reserve it while the block runs."""
        assert num_positions <= self.capacity, "there will never be room"
        async with self._turn:
            while self._sequences_left == 0 or self._positions_left < num_positions:
                self._given_back.clear()
                await self._given_back.wait()
            self._sequences_left -= 1
            self._positions_left -= num_positions
        try:
            yield
        finally:
            self._sequences_left += 1
            self._positions_left += num_positions
            self._given_back.set()


class LocalEngine:
    """An engine with the model in this process. `run` computes.

    All sequences under way get their next token together, as one batch. If there is no room for a sequence, it waits
    its turn.
    """

    def __init__(
        self, model: Transformer, room: Room, *, longest: int, round_number: int = 0, piece_tokens: int = 256,
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            room: the room for positions of sequences, which is enough for a sequence of `longest` tokens.
            piece_tokens: how many tokens of a prompt are computed at once; between pieces other sequences get a token.
            recorder: records the steps in which all sequences get a token, for a GPU.
        """
        assert room.capacity >= longest, "a sequence could wait for ever"
        self._model = model.eval()
        device = next(model.parameters()).device
        self._decoding = Decoding(lambda tensor: tensor.to(device), recorder, most_positions=room.capacity)
        self._room = room
        self.longest = longest
        self.round = round_number
        self._piece_tokens = piece_tokens
        self._sequences: list[_Sequence] = []
        self._changed = asyncio.Event()

    def warm_up(self) -> None:
        """Compile the model's layers for prompts. Blocks for a minute. To be called before `run`."""
        self._model.compile_layers()
        self._decoding.warm_up(self._model, lambda: self._model)

    async def run(self) -> None:
        """Compute until cancelled."""
        loop = asyncio.get_running_loop()
        # Always the same thread, so that torch starts its helper threads only once. Nothing else runs in this thread.
        with ThreadPoolExecutor(1, thread_name_prefix="engine") as thread:
            while True:
                self._changed.clear()
                begun = [sequence for sequence in self._sequences if sequence.is_wanted]
                if not begun:
                    await self._changed.wait()
                    continue
                await loop.run_in_executor(thread, self._compute, begun)
                # A loop here would keep its last sequence, and that sequence's cache, until the next one comes.
                _deliver(begun)

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int, scores: Scores | None = None
    ) -> AsyncGenerator[int, None]:
        require_room(self, prompt, max_tokens)
        async with self._room.taken(len(prompt) + max_tokens):
            cache = self._decoding.cache(len(prompt) + max_tokens)
            sequence = _Sequence(prompt, cache, sampling, num_chosen(max_tokens, scores), scores)
            self._sequences.append(sequence)
            try:
                for _ in range(num_chosen(max_tokens, scores)):
                    self._changed.set()
                    token = await sequence.next_token()
                    if max_tokens:
                        yield token
            finally:
                self._sequences.remove(sequence)

    def _compute(self, sequences: Sequence["_Sequence"]) -> None:
        """Compute a token for each sequence whose prompt is done, and a piece of the first prompt that is not."""
        if together := [sequence for sequence in sequences if sequence.num_new == 1]:
            self._go_on(together)
        if (prompt := next((sequence for sequence in sequences if sequence.num_new > 1), None)) is not None:
            self._go_on([prompt])

    @torch.inference_mode()
    def _go_on(self, sequences: Sequence["_Sequence"]) -> None:
        """Compute the next positions of one sequence, or one position of each."""
        together = [sequence.next_positions(self._piece_tokens) for sequence in sequences]
        outputs = self._decoding.compute(lambda: self._model, together)
        for sequence, positions, output in zip(sequences, together, outputs, strict=True):
            if isinstance(output, BaseException):
                sequence.fail(output)
            else:
                sequence.take(positions.tokens, output)


def _deliver(sequences: Sequence["_Sequence"]) -> None:
    for sequence in sequences:
        sequence.deliver()


class _Sequence:
    """One sequence under way. The compute thread appends its tokens, and `deliver` passes them to the caller."""

    def __init__(
        self, prompt: Sequence[int], cache: KeyValueCache, sampling: Sampling, num_left: int, scores: Scores | None
    ) -> None:
        """`num_left` tokens are to be chosen."""
        self.tokens = list(prompt)
        self.cache = cache
        self._sampling = sampling
        self._scores = scores
        self._scorer = Scorer(NO_SCORING if scores is None else scores.scoring)
        self._num_left = num_left
        self._ready = deque[int]()
        self._num_delivered = len(prompt)
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.cache.num_positions

    @property
    def is_wanted(self) -> bool:
        return self._num_left > 0 and len(self._ready) < _MOST_AHEAD and self._error is None

    def next_positions(self, most_tokens: int) -> NextPositions:
        first = self.cache.num_positions
        tokens = self.tokens[first : first + most_tokens]
        return NextPositions(cache=self.cache, tokens=tokens, num_logits=self._scorer.num_logits(len(tokens)))

    def take(self, piece: Sequence[int], logits_NV: torch.Tensor) -> None:
        """Score a piece's tokens, and choose the next one at the end of the prompt."""
        try:
            self._scorer.add_positions(piece, logits_NV)
            if self.num_new == 0:
                token = choose(logits_NV[-1], self._sampling, len(self.tokens))
                self._scorer.add_chosen(token)
                self.tokens.append(token)
                self._num_left -= 1
        except Exception as error:  # noqa: BLE001 - the caller raises it
            self.fail(error)

    def deliver(self) -> None:
        if self._scores is not None:
            new = self._scorer.take()
            self._scores.extend_from(new, len(new))
        self._ready.extend(self.tokens[self._num_delivered :])
        self._num_delivered = len(self.tokens)
        if self._ready or self._error is not None:
            self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """Make the caller's `next_token` raise this error, after it has taken the tokens computed so far."""
        self._error = error

    async def next_token(self) -> int:
        """Wait for the next token. Raises the error with which its computation failed."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        return self._ready.popleft()


class RoutedEngine:
    """The engines of a run's paths. The first tokens of each sequence choose the path, and so its engine. If that is
    wanted, later ones choose again (DiPaCo, arXiv 2403.10616: routing more frequently at test time)."""

    def __init__(
        self, engines: Sequence[Engine], choose: Callable[[Sequence[int]], int], reroute_every: int = 0
    ) -> None:  # fmt: skip
        """
        Args:
            choose: gives the number of the path of a sequence that begins with these tokens; it may compute for a
                while.
            reroute_every: so many tokens, at least NUM_TOKENS, have one path. The path of the next ones is chosen by
                the NUM_TOKENS before them, and computes all of the sequence so far. 0: a sequence has one path.
        """
        self._engines = engines
        self._choose = choose
        self._every = reroute_every
        self._newest = engines[0]
        self.longest = min(engine.longest for engine in engines)

    @property
    def round(self) -> int | None:
        return self._newest.round

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int, scores: Scores | None = None
    ) -> AsyncGenerator[int, None]:
        require_room(self, prompt, max_tokens)
        tokens, end = list(prompt), len(prompt) + max_tokens
        # What is scored along earlier paths comes first.
        last = self._begin_of(len(prompt)) if max_tokens else len(prompt)
        while scores is not None and scores.next < last:
            path, border = await self._path_at(tokens, scores.next), self._end_of(scores.next)
            while border < last and await self._path_at(tokens, border) == path:
                border = self._end_of(border)
            async for _ in self._along(path, tokens[: min(border, last)], sampling, 0, scores):
                raise AssertionError("no token was asked for")
        while len(tokens) < end:
            path, border = await self._path_at(tokens, len(tokens)), self._end_of(len(tokens))
            async with aclosing(self._along(path, tokens, sampling, end - len(tokens), scores)) as stream:
                async for token in stream:
                    tokens.append(token)
                    yield token
                    if border <= len(tokens) < end:
                        border = self._end_of(len(tokens))
                        # Another path has no keys and values of this sequence, and so begins anew.
                        if await self._path_at(tokens, len(tokens)) != path:
                            break

    async def _along(
        self, path: int, tokens: Sequence[int], sampling: Sampling, max_tokens: int, scores: Scores | None
    ) -> AsyncGenerator[int, None]:
        """Continue a sequence along one path, and add the scores that are missing."""
        self._newest = engine = self._engines[path]
        own = None if scores is None else Scores(dataclasses.replace(scores.scoring, first=scores.next))
        position = len(tokens)
        async with aclosing(engine.generate(tuple(tokens), sampling, max_tokens, own)) as stream:
            async for token in stream:
                position += 1
                if scores is not None and own is not None:
                    scores.catch_up(own, position)
                yield token
        if scores is not None and own is not None:
            scores.catch_up(own, position)

    def _begin_of(self, position: int) -> int:
        """Where the piece of a sequence begins that has one path, and to which a position belongs."""
        return position // self._every * self._every if self._every else 0

    def _end_of(self, position: int) -> int:
        return self._begin_of(position) + self._every if self._every else sys.maxsize

    async def _path_at(self, tokens: Sequence[int], position: int) -> int:
        begin = self._begin_of(position)
        return await asyncio.to_thread(self._choose, tokens[max(0, begin - NUM_TOKENS) :])


def num_chosen(max_tokens: int, scores: Scores | None) -> int:
    """How many tokens are chosen for a sequence. The prompt's scores come with the token after it, even if that one is
    not wanted."""
    return max_tokens if scores is None else max(1, max_tokens)


def require_room(engine: Engine, prompt: Sequence[int], max_tokens: int) -> None:
    """Raise ValueError for a sequence that an engine cannot continue."""
    if not prompt:
        raise ValueError("the prompt has no tokens")
    if len(prompt) + max_tokens > engine.longest:
        raise ValueError(
            f"the prompt has {counted(len(prompt), 'token')}, and {max_tokens} more make a sequence longer than the "
            f"model's {engine.longest}"
        )


async def collect(engine: Engine, prompt: Sequence[int], sampling: Sampling, max_tokens: int) -> list[int]:
    async with aclosing(engine.generate(prompt, sampling, max_tokens)) as stream:
        return [token async for token in stream]
