"""What computes the next token, behind one interface.

`LocalEngine` has the whole model in this process: of a run folder or of checkpoints.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import torch

from swarm.generation.sampling import Sampling, choose
from swarm.model.attention import KeyValueCache
from swarm.model.transformer import Transformer


class Engine(Protocol):
    """Continues sequences of tokens."""

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, prompt included."""
        ...

    def generate(self, prompt: Sequence[int], sampling: Sampling, max_tokens: int) -> AsyncGenerator[int, None]:
        """Continue a prompt of at least one token, token by token, until the caller stops or `max_tokens` are there.

        Closing the iterator gives up what is kept for the sequence.

        Raises:
            ValueError: the prompt is empty, or with `max_tokens` longer than `longest`.
        """
        ...


class LocalEngine:
    """A model in this process. Several sequences take turns, token by token."""

    def __init__(self, model: Transformer, *, longest: int) -> None:
        self._model = model.eval()
        self._longest = longest
        self._turn = asyncio.Lock()

    @property
    def longest(self) -> int:
        return self._longest

    async def generate(self, prompt: Sequence[int], sampling: Sampling, max_tokens: int) -> AsyncGenerator[int, None]:
        require_room(self, prompt, max_tokens)
        cache = KeyValueCache(len(prompt) + max_tokens)
        tokens = list(prompt)
        for _ in range(max_tokens):
            new = torch.tensor([tokens[cache.num_positions :]])
            async with self._turn:
                logits_V = await asyncio.to_thread(self._step, new, cache)
            tokens.append(choose(logits_V, sampling, len(tokens)))
            yield tokens[-1]

    @torch.inference_mode()
    def _step(self, tokens_1T: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        logits_1V: torch.Tensor = self._model(tokens_1T, cache=cache)[0]
        return logits_1V[-1]


def require_room(engine: Engine, prompt: Sequence[int], max_tokens: int) -> None:
    """Raise ValueError for a sequence that an engine cannot continue."""
    if not prompt:
        raise ValueError("the prompt has no tokens")
    if len(prompt) + max_tokens > engine.longest:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, and {max_tokens} more make a sequence longer than the model's "
            f"{engine.longest}"
        )


async def collect(engine: Engine, prompt: Sequence[int], sampling: Sampling, max_tokens: int) -> list[int]:
    """All tokens of a continuation."""
    async with aclosing(engine.generate(prompt, sampling, max_tokens)) as stream:
        return [token async for token in stream]
