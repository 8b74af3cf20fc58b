"""Connections break and trainers give up at random. Every microbatch that counts, counts once."""

import asyncio
import dataclasses
import random
import time
from contextlib import AsyncExitStack

import pytest
import torch

from swarm.config import RoundsConfig, RunConfig
from swarm.errors import RetriesExhausted, StaleMicrobatch
from swarm.machine.clock import SystemClock
from tests.support.chain import DILOCO, SYNCHRONOUS, Chain, assert_close, eventually, reference, running_chain
from tests.support.proxy import Proxy

_NUM_MICROBATCHES = 12
_NUM_CUTS = 40
"""The number of cuts is limited: if connecting takes longer than the time between two cuts, nothing gets through."""
_DILOCO = dataclasses.replace(DILOCO, rounds=RoundsConfig(round_samples=16, inner_batch_samples=1000))
_SYNCHRONOUS = dataclasses.replace(SYNCHRONOUS, rounds=RoundsConfig(setting="synchronous", round_samples=1000))


class _FastClock(SystemClock):
    """A clock that runs fast, so that bans and waits for retries are short."""

    def monotonic(self) -> float:
        return 50 * time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 50)


async def _train(chain: Chain, index: int, rng: random.Random) -> None:
    """Train a microbatch until it is acknowledged. Some answers are discarded, and for some the trainer does not
    wait."""
    while True:
        training = asyncio.create_task(chain.train(index))
        if rng.random() < 0.3:
            await asyncio.wait([training], timeout=rng.uniform(0.0, 0.05))
            if training.cancel():
                await asyncio.wait([training])
                continue
        try:
            reply = await training
        except (StaleMicrobatch, RetriesExhausted):
            continue
        if rng.random() < 0.3:
            reply.close()
            continue
        await chain.ack(reply)
        return


@pytest.mark.parametrize("config", [_SYNCHRONOUS, _DILOCO], ids=["synchronous", "diloco"])
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1])
async def test_what_counts_counts_once(config: RunConfig, seed: int) -> None:
    rng = random.Random(seed)
    clock = _FastClock()
    async with AsyncExitStack() as stack:
        chain = await stack.enter_async_context(
            running_chain(config, num_peers=(2, 2, 2), clock=clock, hop_clock=clock)
        )
        proxies = []
        for peer in chain.peers:
            port = int(peer.record.endpoint.rpartition(":")[2])
            proxies.append(await stack.enter_async_context(Proxy("127.0.0.1", port)))
            peer.record = peer.record.model_copy(update={"endpoint": proxies[-1].address})
        chain.update([peer.record for peer in chain.peers])

        async def break_connections() -> None:
            for _ in range(_NUM_CUTS):
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                rng.choice(proxies).cut()

        breaking = asyncio.create_task(break_connections())
        await asyncio.gather(*(_train(chain, index, rng) for index in range(_NUM_MICROBATCHES)))
        breaking.cancel()
        await eventually(
            lambda: all(not peer.stage.ledger.uncommitted() and peer.num_idle == (0, 0, 0, 0) for peer in chain.peers)
        )

        counted = [peer.stage.ledger.committed(0) for peer in chain.peers]
        for peer, microbatches in zip(chain.peers, counted, strict=True):
            bucket = peer.weights.buckets.open()
            assert bucket.num_samples == 2 * len(microbatches)
            expected = reference(config, sorted(microbatches))[1]
            zeros = {name: torch.zeros_like(value) for name, value in bucket.sums.items()}
            assert_close(bucket.sums, {name: expected.get(name, zeros[name]) for name in zeros}, 1e-4)
            if peer.weights.sketch is not None:
                entries = [peer.stage.ledger.find(index) for index in microbatches]
                sketches = [entry.computation.sketch for entry in entries if entry and entry.computation]
                assert len(sketches) == len(microbatches)
                sum_N = torch.stack(sketches).sum(0) if sketches else torch.zeros(())
                assert torch.allclose(peer.weights.sketch.of(bucket.sums), sum_N, atol=1e-3)
        by_stage = [counted[0] | counted[1], counted[2] | counted[3], counted[4] | counted[5]]
        assert by_stage[2] <= by_stage[1] <= by_stage[0], "an ack comes from upstream"
        assert [len(left & right) for left, right in zip(counted[::2], counted[1::2], strict=True)] == [0, 0, 0]
