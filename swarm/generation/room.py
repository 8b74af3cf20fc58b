"""Limits how many sequences may be under way at once, and how many of their positions may be kept."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Room:
    """Room for a few sequences. If there is too little room for one, that one and all later ones wait, in order."""

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
