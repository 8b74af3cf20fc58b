"""How many sequences may be under way at once, and how many positions of them may be kept. Nothing is kept here."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Room:
    """Room for a few sequences. One that finds too little waits, and none that comes later goes before it."""

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
