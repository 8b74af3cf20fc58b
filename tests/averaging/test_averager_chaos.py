"""Random kills, freezes, delays and losses: whatever happens, no two members commit different results."""

import asyncio
import random
from collections import defaultdict
from contextlib import suppress

import pytest

from swarm.errors import PeerUnavailable
from tests.averaging.doubles import Network, Peer, until
from tests.averaging.fake_stage import make_config
from tests.support.virtual_time import in_virtual_time

NUM_PEERS, NUM_ROUNDS, MICROBATCHES = 5, 4, 6


class Chaos:
    """A synchronous stage of five peers with random faults. At most two peers are killed. Others are frozen for a
    while, one at a time."""

    def __init__(self, seed: int, quorum: str, loss: float) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.network = Network(make_config(microbatches=MICROBATCHES, quorum=quorum))
        self.network.before = self.network.after = self.disturb
        for number in range(1, NUM_PEERS + 1):
            self.network.add(number)

    async def disturb(self, name: str, source: int, target: int) -> None:
        if self.random.random() < self.loss:
            raise PeerUnavailable("lost", is_unreachable=True)
        if self.random.random() < 0.3:
            await asyncio.sleep(0.03 * self.random.random())

    @property
    def alive(self) -> list[Peer]:
        return [peer for peer in self.network.peers.values() if not peer.dead.is_set()]

    async def feed(self) -> None:
        """Give the microbatches that a round lacks to random members at this round, and sometimes give one twice."""
        while True:
            awake = [peer.stage for peer in self.alive if peer.thawed.is_set()]
            number = self.random.choice(awake).round
            takers = [stage for stage in awake if stage.round == number and not stage.closed]
            wanted = range(MICROBATCHES * number, MICROBATCHES * (number + 1))
            held = set().union(*(stage.indices for stage in awake))
            if takers:
                missing = [index for index in wanted if index not in held]
                self.random.choice(takers).learn(self.random.choice(missing or wanted))
            await asyncio.sleep(0.02)

    async def destroy(self) -> None:
        for kill in (False, True, False, True, False):
            await asyncio.sleep(0.6 * self.random.random())
            number = self.random.choice(self.alive).number
            if kill:
                self.network.kill(number)
            else:
                self.network.freeze(number)
                await asyncio.sleep(1.2 * self.random.random())
                self.network.thaw(number)

    async def run(self) -> None:
        """Run until nothing more goes wrong and the survivors agree."""
        feeder = asyncio.create_task(self.feed())
        await self.destroy()
        self.loss = 0.0
        rounds = max(peer.stage.round for peer in self.alive) + 1
        with suppress(TimeoutError):
            # A majority of the last members may be gone for good. Then the group must not go on.
            await until(lambda: any(peer.stage.round > rounds for peer in self.alive), 4.0)
        # If one part went ahead alone, the others notice that they are more only once they also go on.
        await until(lambda: len({(peer.stage.round, peer.stage.lineage) for peer in self.alive}) == 1)
        feeder.cancel()
        await self.network.stop()

    def digests(self) -> dict[int, set[str]]:
        digests: dict[int, set[str]] = defaultdict(set)
        for peer in self.network.peers.values():
            for result in peer.stage.results:
                assert result.num_samples == 2 * MICROBATCHES
                digests[result.round].add(result.digest)
        return digests


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.0, 0.02])
@in_virtual_time
async def test_majority_never_forks(loss: float) -> None:
    runs = [Chaos(seed, "majority", loss) for seed in range(12)]
    await asyncio.gather(*(chaos.run() for chaos in runs))
    assert all(len(results) == 1 for chaos in runs for results in chaos.digests().values())
    assert sum(len(chaos.digests()) for chaos in runs) > len(runs)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.0, 0.02])
@in_virtual_time
async def test_available_always_comes_together_again(loss: float) -> None:
    runs = [Chaos(seed, "available", loss) for seed in range(12)]
    await asyncio.gather(*(chaos.run() for chaos in runs))
    for chaos in runs:
        assert len({peer.stage.digest for peer in chaos.alive}) == 1
        assert chaos.digests()
