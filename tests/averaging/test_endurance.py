"""Calls that fail again and again must not leak memory, tasks or descriptors."""

import asyncio
import gc
import logging
import os
import tracemalloc
from typing import Any

import pytest
import torch

from swarm.errors import PeerUnavailable
from swarm.machine import memory
from tests.averaging.doubles import Network, network_of, peer_id, until
from tests.averaging.fake_stage import gradient, make_config
from tests.support.virtual_time import run

LONG_SECONDS = 1e6
"""The length of the test in virtual time."""


def num_aborted(network: Network) -> int:
    return sum(sum(peer.averager.counters().aborted.values()) for peer in network.peers.values())


def begin_failing(network: Network, failing: str) -> None:
    """Give peers 1 to 3 something to contribute, and let all calls of one name fail from now on."""

    async def fail(name: str, source: int, target: int) -> None:
        if name == failing:
            raise PeerUnavailable("cut off", is_unreachable=True)

    for number in (1, 2, 3):
        network.peers[peer_id(number)].stage.learn(2 * number - 2, 2 * number - 1)
    network.before = fail


def held() -> tuple[int, int, int]:
    """The number of tasks, of descriptors and of bytes of memory that are held."""
    gc.collect()
    return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")), tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("count", [3, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
@pytest.mark.parametrize(("setting", "failing"), [("synchronous", "Exchange"), ("diloco", "Average")])
def test_aborted_rounds_leave_nothing_behind_and_lose_nothing(
    setting: str, failing: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    # Captured warnings would count as leaked memory.
    caplog.set_level(logging.CRITICAL)

    async def trial() -> None:
        config = make_config(setting, microbatches=6, codec="fp32")
        async with network_of(config, 1, 2, 3) as network:
            begin_failing(network, failing)
            await until(lambda: num_aborted(network) >= 3, LONG_SECONDS)
            network.calls.clear()
            tasks, descriptors, num_bytes = held()
            goal = num_aborted(network) + count
            await until(lambda: num_aborted(network) >= goal, LONG_SECONDS)
            network.calls.clear()
            later = held()
            assert later[0] <= tasks + 3, "tasks are left behind"
            assert later[1] <= descriptors, "descriptors are left behind"
            assert later[2] < num_bytes + 50_000, "memory is left behind"
            assert all(peer.stage.round == 0 for peer in network.peers.values())

            async def work(name: str, source: int, target: int) -> None:
                pass

            network.before = work
            stages = [peer.stage for peer in network.peers.values()]
            await until(lambda: all(stage.round == 1 for stage in stages), LONG_SECONDS)
            mean = torch.stack([gradient(index).double() for index in range(6)]).mean(0)
            for stage in stages:
                # torch.testing would import half of torch here, with all its memory traced.
                assert torch.allclose(stage.anchor.double(), -mean, rtol=1e-6, atol=1e-6)

    tracemalloc.start()
    try:
        run(trial())
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("failing", ["Exchange", "Average"])
def test_a_failed_exchange_lets_go_of_its_vectors_at_once(
    failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each vector is as large as the stage. A failed exchange would keep them until Python looks for cycles.

    Where no other member can be asked to Average, the leader cancels its own exchange.
    """
    caplog.set_level(logging.CRITICAL)
    num_made, make = 0, memory._aligned

    def aligned(num_elements: int) -> Any:
        nonlocal num_made
        num_made += 1
        return make(num_elements)

    monkeypatch.setattr(memory, "_aligned", aligned)

    async def trial() -> None:
        async with network_of(make_config("synchronous", microbatches=6, codec="fp32"), 1, 2, 3) as network:
            begin_failing(network, failing)
            await until(lambda: num_aborted(network) >= 3, LONG_SECONDS)
            gc.collect()
            gc.disable()
            before, goal = num_made, num_aborted(network) + 6
            await until(lambda: num_aborted(network) >= goal, LONG_SECONDS)
            assert num_made == before > 0

    try:
        run(trial())
    finally:
        gc.enable()
