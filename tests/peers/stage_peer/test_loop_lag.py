"""A task that holds the event loop shows as a lag, for a while."""

import asyncio

import pytest

from peers.stage_peer.presence import KEPT_SECONDS, LoopLag
from tests.support.virtual_time import LoopClock, in_virtual_time, virtual_loop


@in_virtual_time
async def test_the_longest_hold_of_the_loop_is_known_for_a_minute_or_two() -> None:
    lag = LoopLag(LoopClock())
    measuring = asyncio.create_task(lag.run())
    await asyncio.sleep(10.0)
    assert lag.seconds == pytest.approx(0.0, abs=1e-6)
    for seconds in (0.3, 0.8, 0.5):
        virtual_loop().advance(seconds)  # This imitates a callback that computes for this time.
        await asyncio.sleep(1.0)
    assert lag.seconds == pytest.approx(0.8, abs=0.02)
    await asyncio.sleep(KEPT_SECONDS - 20.0)
    assert lag.seconds == pytest.approx(0.8, abs=0.02)
    await asyncio.sleep(2 * KEPT_SECONDS)
    assert lag.seconds == pytest.approx(0.0, abs=1e-6)
    measuring.cancel()
