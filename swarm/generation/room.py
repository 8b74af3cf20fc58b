"""How many sequences may be under way at once, and how many positions of them may be kept. Nothing is kept here."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm.config import ModelConfig

_NUMBER_BYTES = 4
"""Of a key's or a value's element, which is float32."""


class Room:
    """Room for a few sequences. Who finds too little waits, and nobody who comes later goes before."""

    def __init__(self, num_sequences: int, capacity: int) -> None:
        """
        Args:
            capacity: the most positions, of all sequences together.
        """
        self.capacity = capacity
        self._sequences_left = num_sequences
        self._positions_left = capacity
        self._turn = asyncio.Lock()
        self._given_back = asyncio.Event()

    @asynccontextmanager
    async def taken(self, num_positions: int) -> AsyncIterator[None]:
        """Have room for a sequence of so many positions inside the block, once there is."""
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


def bytes_per_position(model: ModelConfig) -> int:
    """Bytes of a position's keys and values in all layers."""
    return 2 * model.num_layers * model.kv_heads * model.width_of_heads * _NUMBER_BYTES
