"""How a program finds the others when it starts."""

import random
from collections.abc import Sequence
from typing import cast

import pytest

from peers import network
from peers.network import KnownPeers
from swarm.clock import SystemClock
from swarm.dht.directory import Directory
from swarm.errors import PeerUnavailable
from swarm.routing.router import Router
from swarm.types import PeerRecord


class _Directory:
    """Has nobody, and cannot be read so many times."""

    def __init__(self, num_faults: int) -> None:
        self.num_faults = num_faults

    async def peers(self, stage: int) -> Sequence[PeerRecord]:
        self.num_faults -= 1
        if self.num_faults >= 0:
            raise PeerUnavailable("no other node of the DHT answers")
        return []


async def test_the_first_look_is_tried_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SystemClock()
    known = KnownPeers(Router(clock, random.Random(0)))
    await known.look_first(cast(Directory, _Directory(1)), [0, 1], clock)
    assert known.records == {0: [], 1: []}
    monkeypatch.setattr(network, "DISCOVERY_SECONDS", 0.2)
    with pytest.raises(PeerUnavailable, match="no other node"):
        await known.look_first(cast(Directory, _Directory(1000)), [0, 1], clock)
