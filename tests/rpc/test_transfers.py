"""Whose turn it is to download, how much of the line that leaves to training, and the rate at which it comes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from swarm.errors import Overloaded
from swarm.rpc.callers import Caller
from swarm.rpc.transfers import (
    HOLD_SECONDS,
    KEPT_SECONDS,
    MOST_WAITING,
    RETRY_SECONDS,
    TURN_SECONDS,
    Turns,
)
from tests.support.virtual_time import LoopClock, in_virtual_time

PIECE_SECONDS = 1.5
"""How long a piece takes for a peer that has the line alone."""


class _Line:
    """A line that all downloads over it share equally."""

    def __init__(self, *, is_training: bool = False) -> None:
        self.clock = LoopClock()
        self.turns = Turns(self.clock, is_training=lambda: is_training)
        self.num_users = self.most_users = 0
        self.used_seconds = 0.0

    @asynccontextmanager
    async def _used(self) -> AsyncIterator[None]:
        self.num_users += 1
        self.most_users = max(self.most_users, self.num_users)
        try:
            yield
        finally:
            self.num_users -= 1

    async def piece(self, who: str) -> None:
        async with self.turns.turn(who), self._used():
            await self.clock.sleep(PIECE_SECONDS)
            self.used_seconds += PIECE_SECONDS

    async def download(self, who: str, num_pieces: int) -> float:
        """Fetch all pieces, as a peer does; returns when they were there."""
        for _ in range(num_pieces):
            while True:
                try:
                    await self.piece(who)
                    break
                except Overloaded as error:
                    await self.clock.sleep(error.retry_after_seconds)
        return self.clock.monotonic()


@in_virtual_time
async def test_four_joiners_download_one_after_the_other_and_all_finish() -> None:
    line = _Line()
    ended_at = await asyncio.gather(*(line.download(name, 10) for name in "abcd"))
    assert line.most_users == 1
    assert list(ended_at) == sorted(ended_at)
    alone = 10 * PIECE_SECONDS
    for number, seconds in enumerate(ended_at):
        usual = (number + 1) * alone
        assert usual <= seconds <= usual + number * (HOLD_SECONDS + RETRY_SECONDS) + 0.1


@in_virtual_time
async def test_a_download_leaves_half_of_the_time_to_training() -> None:
    idle, busy = _Line(), _Line(is_training=True)
    began_at = idle.clock.monotonic()
    assert await idle.download("a", 20) - began_at == pytest.approx(20 * PIECE_SECONDS)
    began_at = busy.clock.monotonic()
    seconds = await busy.download("a", 20) - began_at
    assert busy.used_seconds / seconds == pytest.approx(0.5, abs=0.03)


async def _place(line: _Line, who: str) -> str:
    with pytest.raises(Overloaded) as refused:
        await line.piece(who)
    return str(refused.value)


@in_virtual_time
async def test_who_waits_is_told_its_place_and_keeps_it_while_it_asks() -> None:
    line = _Line()
    await line.piece("a")
    assert await _place(line, "b") == "1 other downloads first"
    assert await _place(line, "c") == "2 others download first"
    assert await _place(line, "b") == "1 other downloads first"
    await line.clock.sleep(HOLD_SECONDS)
    assert await _place(line, "c") == "1 other downloads first", "b comes first, though it has not come yet"
    await line.clock.sleep(KEPT_SECONDS)
    await line.piece("c")
    assert await _place(line, "b") == "1 other downloads first", "it did not ask for too long"


@in_virtual_time
async def test_nobody_keeps_the_others_from_it_for_ever() -> None:
    """One peer takes each piece slowly, and one never ends its call."""
    line, began_at = _Line(), LoopClock().monotonic()
    slow = asyncio.create_task(line.download("slow", 10_000))
    await asyncio.sleep(0.1)
    ended_at = await line.download("b", 3)
    assert TURN_SECONDS <= ended_at - began_at <= TURN_SECONDS + 4 * PIECE_SECONDS + RETRY_SECONDS
    slow.cancel()
    await asyncio.wait([slow])
    await line.clock.sleep(KEPT_SECONDS)
    async with line.turns.turn("hanging"):
        began_at = line.clock.monotonic()
        ended_at = await line.download("b", 3)
        assert ended_at - began_at <= TURN_SECONDS + 4 * PIECE_SECONDS + RETRY_SECONDS


@in_virtual_time
async def test_a_call_that_ends_early_leaves_the_turn_to_others() -> None:
    line = _Line()
    broken_off = asyncio.create_task(line.piece("a"))
    await asyncio.sleep(0.1)
    broken_off.cancel()
    await asyncio.wait([broken_off])
    await line.clock.sleep(HOLD_SECONDS)
    await line.piece("b")


@in_virtual_time
async def test_any_number_that_ask_take_bounded_memory_and_one_by_one_they_come() -> None:
    line = _Line()
    await line.piece("a")
    places = [await _place(line, str(number)) for number in range(3 * MOST_WAITING)]
    assert places[-1] == f"{MOST_WAITING // 2 + 1} others download first", "one caller has half of the places"


@in_virtual_time
async def test_a_caller_that_makes_up_peers_holds_up_another_by_one_of_them_at_a_time() -> None:
    turns, clock, one, two = Turns(LoopClock(), is_training=lambda: False), LoopClock(), Caller("one"), Caller("two")

    async def piece(who: str, caller: Caller) -> bool:
        with suppress(Overloaded):
            async with turns.turn(who, caller):
                return True
        return False

    made_up, honest = [f"made up {number}" for number in range(MOST_WAITING)], ["honest", "later"]
    assert await piece(made_up[0], one)
    served: list[str] = []
    while not set(honest) <= set(served):
        for who, caller in ((who, caller) for group, caller in ((made_up, one), (honest, two)) for who in group):
            if await piece(who, caller) and who not in served:
                served.append(who)
        await clock.sleep(HOLD_SECONDS)
    assert served[1] == "honest"
    assert len(served) <= 4, served
    # Whoever has another's name has not its turn.
    assert not await piece(served[-1], one if served[-1] in honest else two)
