"""Turns bound how many forwards run ahead of the steps that will use their gradients."""

import asyncio
from contextlib import suppress

from swarm.stage.settings.diloco import FIRST_LATE_SECONDS, LATE, Turns
from tests.support.chain import eventually
from tests.support.manual_clock import ManualClock


class Peer:
    """A peer's turns: which microbatches have one, and how many gradients wait for a step."""

    def __init__(self, most: int) -> None:
        self.num_unstepped = 0
        self.clock = ManualClock()
        self.turns = Turns(most, lambda: self.num_unstepped, self.clock)
        self.running: list[int] = []
        self._ends: dict[int, asyncio.Event] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def begin(self, *ages: int) -> None:
        for age in ages:
            self._ends[age] = asyncio.Event()
            self._tasks[age] = asyncio.create_task(self._run(age))
        await asyncio.sleep(0)

    async def _run(self, age: int) -> None:
        async with self.turns.turn(age):
            self.running.append(age)
            await self._ends[age].wait()
            self.num_unstepped += 1

    async def end(self, age: int) -> None:
        """End a microbatch's turn: its gradient is accumulated."""
        self._ends[age].set()
        await self._tasks[age]

    async def cancel(self, age: int) -> None:
        self._tasks[age].cancel()
        with suppress(asyncio.CancelledError):
            await self._tasks[age]

    async def step(self, count: int) -> None:
        self.num_unstepped -= count
        self.turns.look()
        await asyncio.sleep(0)


async def test_no_more_begin_than_a_step_will_use_and_the_oldest_is_next() -> None:
    peer = Peer(2)
    await peer.begin(0, 1, 3, 2)
    assert (peer.running, peer.turns.num_waiting) == ([0, 1], 2)
    await peer.end(0)
    await peer.end(1)
    assert peer.running == [0, 1], "their gradients wait for the step"
    await peer.step(2)
    await eventually(lambda: peer.running == [0, 1, 2, 3])


async def test_what_fails_or_is_given_up_makes_room() -> None:
    peer = Peer(1)
    await peer.begin(0, 1, 2)
    await peer.cancel(1)
    await peer.cancel(0)
    await eventually(lambda: peer.running == [0, 2])


async def test_one_that_is_late_holds_up_nobody() -> None:
    """A peer of a later stage may be frozen. Microbatches that take as long as usual are still waited for."""
    peer = Peer(1)
    await peer.begin(0)
    peer.clock.advance(10.0)
    await peer.end(0)
    await peer.step(1)
    await peer.begin(1, 2)
    peer.clock.advance(LATE * 10.0 - 1.0)
    peer.turns.look()
    assert peer.running == [0, 1]
    peer.clock.advance(1.0)
    await eventually(lambda: peer.running == [0, 1, 2])


async def test_the_first_hold_up_nobody_for_long_either() -> None:
    """For example, a peer joins while a later stage has no peers. It does not know yet how long microbatches usually
    take."""
    peer = Peer(1)
    await peer.begin(0, 1)
    peer.clock.advance(FIRST_LATE_SECONDS - 1.0)
    peer.turns.look()
    assert peer.running == [0]
    peer.clock.advance(1.0)
    await eventually(lambda: peer.running == [0, 1])
