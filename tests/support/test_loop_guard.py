"""The guard of event loops finds exactly what it has to find."""

import asyncio
import time
from collections.abc import Callable

import pytest
import torch

from tests.support.loop_guard import LARGEST_BYTES, LONGEST_SECONDS, guarded_loops


async def test_the_guard_finds_large_tensors_and_long_callbacks_and_nothing_else() -> None:
    large, small = torch.ones(LARGEST_BYTES // 4 + 1), torch.ones(LARGEST_BYTES // 4)

    def compute() -> None:
        ends_at = time.thread_time() + 1.2 * LONGEST_SECONDS
        while time.thread_time() < ends_at:
            pass

    async def elsewhere() -> None:
        small.add_(1.0)
        large[1:].view(-1).detach()
        time.sleep(2 * LONGEST_SECONDS)  # noqa: ASYNC251 - it takes no processor time
        await asyncio.to_thread(compute)
        await asyncio.to_thread(large.add_, 1.0)

    with guarded_loops():
        await asyncio.create_task(elsewhere())

    async def guarded(fault: Callable[[], object]) -> None:
        with guarded_loops():
            asyncio.get_running_loop().call_soon(fault)
            await asyncio.sleep(0)

    with pytest.raises(AssertionError, match="touches"):
        await guarded(lambda: large.add_(1.0))
    with pytest.raises(AssertionError, match="held"):
        await guarded(compute)
