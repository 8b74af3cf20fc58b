"""A group of peers that goes on committing rounds while a newcomer joins it."""

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import patch

from tests.averaging.doubles import QUICK, Network, Peer, network_of, peer_id, until
from tests.averaging.fake_stage import make_config


class Group:
    """A DiLoCo stage of some peers, which a newcomer with the lowest id joins."""

    def __init__(self, network: Network, *numbers: int) -> None:
        self.network = network
        self.peers = [network.peers[peer_id(number)] for number in numbers]
        self.stages = [peer.stage for peer in self.peers]
        self.next_index = 0

    async def commit(self) -> None:
        """Commit one more round, in which every living peer has learnt something."""
        alive = [peer.stage for peer in self.peers if not peer.dead.is_set()]
        number = max(stage.round for stage in alive)
        for stage in alive:
            stage.learn(self.next_index)
            self.next_index += 1
        await until(lambda: all(stage.round > number for stage in alive))

    def add_joiner(self) -> Peer:
        """Add a newcomer, which waits for donors that a script holds up."""
        self.network.timing = dataclasses.replace(QUICK, silence_seconds=5.0)
        return self.network.add(1)

    async def admit(self, joiner: Peer) -> None:
        """Commit a round with the newcomer, and check that all peers see that it leads now."""
        self.peers.insert(0, joiner)
        self.stages.insert(0, joiner.stage)
        await until(lambda: all(peer.averager.view().leader_id == joiner.record.peer_id for peer in self.peers))
        await until(lambda: len(joiner.averager.view().progress) == len(self.peers))

    @property
    def digests(self) -> set[str]:
        return {peer.stage.digest for peer in self.network.peers.values() if not peer.dead.is_set()}


@asynccontextmanager
async def group_of(*numbers: int, segment_bytes: int = 16) -> AsyncIterator[Group]:
    config = make_config("diloco", microbatches=len(numbers))
    with patch("swarm.averaging.donor.SEGMENT_BYTES", segment_bytes):
        async with network_of(config, *numbers) as network:
            group = Group(network, *numbers)
            await group.commit()
            yield group


def is_download(name: str, source: int) -> bool:
    return name == "Download" and source == 1
