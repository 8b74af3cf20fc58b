"""The interface of engines, which compute the next tokens of sequences, and LocalEngine, which has the model in this
process.

The other engine is pipeline/swarm_engine.py, for a running swarm.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Protocol

import torch

from swarm.generation.choice import choose
from swarm.generation.room import Room
from swarm.generation.sampling import Sampling
from swarm.machine.words import counted
from swarm.model.attention import CacheRows, KeyValueCache
from swarm.model.transformer import Transformer

_MOST_AHEAD = 4
"""The most tokens that are computed before the caller takes them. A sequence with that many is left out, so a slow
caller does not delay the others."""


class Engine(Protocol):
    """Continues sequences of tokens."""

    @property
    def longest(self) -> int:
        """The most tokens of a sequence, prompt included."""
        ...

    @property
    def round(self) -> int | None:
        """The round of the weights that continue the newest sequence, or one that begins now; None if not known."""
        ...

    def generate(self, prompt: Sequence[int], sampling: Sampling, max_tokens: int) -> AsyncGenerator[int, None]:
        """Continue a prompt of at least one token, token by token, until the caller stops or `max_tokens` are computed.

        Closing the iterator frees what is kept for the sequence.

        Raises:
            ValueError: the prompt is empty, or together with `max_tokens` longer than `longest`.
            SwarmError: the sequence cannot be continued, now or at all.
        """
        ...


class LocalEngine:
    """An engine with the model in this process. `run` computes.

    All sequences under way get their next token together, as one batch. If there is no room for a sequence, it waits
    its turn.
    """

    def __init__(
        self, model: Transformer, room: Room, *, longest: int, round_number: int = 0, piece_tokens: int = 256
    ) -> None:
        """
        Args:
            room: the room for positions of sequences, which is enough for a sequence of `longest` tokens.
            piece_tokens: how many tokens of a prompt are computed at once; between pieces other sequences get a token.
        """
        assert room.capacity >= longest, "a sequence could wait for ever"
        self._model = model.eval()
        self._room = room
        self.longest = longest
        self.round = round_number
        self._piece_tokens = piece_tokens
        self._sequences: list[_Sequence] = []
        self._changed = asyncio.Event()

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
                try:
                    await loop.run_in_executor(thread, self._compute, begun)
                except Exception as error:  # noqa: BLE001 - such as out of memory; the callers raise it
                    for sequence in begun:
                        sequence.fail(error)
                for sequence in begun:
                    sequence.deliver()

    async def generate(self, prompt: Sequence[int], sampling: Sampling, max_tokens: int) -> AsyncGenerator[int, None]:
        require_room(self, prompt, max_tokens)
        async with self._room.taken(len(prompt) + max_tokens):
            sequence = _Sequence(prompt, sampling, max_tokens)
            self._sequences.append(sequence)
            try:
                for _ in range(max_tokens):
                    self._changed.set()
                    yield await sequence.next_token()
            finally:
                self._sequences.remove(sequence)

    @torch.inference_mode()
    def _compute(self, sequences: Sequence["_Sequence"]) -> None:
        """Compute a token for each sequence whose prompt is done, and a piece of the first prompt that is not."""
        if together := [sequence for sequence in sequences if sequence.num_new == 1]:
            tokens_B1 = torch.tensor([sequence.tokens[-1:] for sequence in together])
            logits_B1V = self._model(tokens_B1, cache=CacheRows([sequence.cache for sequence in together]))
            for sequence, logits_1V in zip(together, logits_B1V, strict=True):
                sequence.append(logits_1V[-1])
        if (prompt := next((sequence for sequence in sequences if sequence.num_new > 1), None)) is not None:
            first = prompt.cache.num_positions
            piece_1T = torch.tensor([prompt.tokens[first : first + self._piece_tokens]])
            logits_11V = self._model(piece_1T, cache=prompt.cache)
            if prompt.num_new == 0:
                prompt.append(logits_11V[0, -1])


class _Sequence:
    """One sequence under way. The compute thread appends its tokens, and `deliver` passes them to the caller."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling, max_tokens: int) -> None:
        self.tokens = list(prompt)
        self.cache = KeyValueCache(len(prompt) + max_tokens)
        self._sampling = sampling
        self._num_left = max_tokens
        self._ready = deque[int]()
        self._num_delivered = len(prompt)
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    @property
    def num_new(self) -> int:
        """The number of tokens that the model has not seen yet."""
        return len(self.tokens) - self.cache.num_positions

    @property
    def is_wanted(self) -> bool:
        """Whether the next token of this sequence is to be computed now."""
        return self._num_left > 0 and len(self._ready) < _MOST_AHEAD and self._error is None

    def append(self, logits_V: torch.Tensor) -> None:
        """Choose the next token."""
        self.tokens.append(choose(logits_V, self._sampling, len(self.tokens)))
        self._num_left -= 1

    def deliver(self) -> None:
        """Pass the computed tokens to the caller."""
        self._ready.extend(self.tokens[self._num_delivered :])
        self._num_delivered = len(self.tokens)
        if self._ready or self._error is not None:
            self._arrived.set()

    def fail(self, error: Exception) -> None:
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
    """Collect all tokens of a continuation."""
    async with aclosing(engine.generate(prompt, sampling, max_tokens)) as stream:
        return [token async for token in stream]
