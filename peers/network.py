"""What every program does to be part of a swarm's network: enter the DHT, agree on the configuration, know the peers.

Used by swarm-peer, swarm-trainer and swarm-status. Nothing here computes or serves.
"""

import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm import config as configs
from swarm.clock import Clock
from swarm.config import RunConfig
from swarm.dht.directory import DhtDirectory, discover_config
from swarm.dht.node import DhtNode
from swarm.errors import IncompatibleVersion
from swarm.routing.router import Router
from swarm.types import PROTOCOL_VERSION, PeerRecord, PeerState

REFRESH_SECONDS = 2.0
"""Time between two looks into the DHT."""


@dataclass
class KnownPeers:
    """The stage peers as the DHT last told of them; feeds the router. With the DHT gone, it stays as it was."""

    router: Router
    own_id: str = ""
    records: dict[int, Sequence[PeerRecord]] = field(default_factory=dict)

    def update(self, stage: int, records: Sequence[PeerRecord]) -> None:
        """Take over a stage's announcements."""
        self.records[stage] = records
        self.router.update(stage, [record for record in records if record.peer_id != self.own_id])

    def peers(self, stage: int) -> Sequence[PeerRecord]:
        """Everybody who announced itself at a stage and has not expired."""
        return self.records.get(stage, ())

    def serving(self, stage: int) -> list[PeerRecord]:
        """The others that serve a stage."""
        return [r for r in self.peers(stage) if r.state is PeerState.SERVING and r.peer_id != self.own_id]

    def dht_addresses(self, limit: int) -> list[str]:
        """Addresses of up to `limit` other peers at which the DHT can be entered, spread over the stages."""
        rows = [[r.dht_address for r in records if r.dht_address] for _, records in sorted(self.records.items())]
        spread = [row[i] for i in range(max(map(len, rows), default=0)) for row in rows if i < len(row)]
        return list(dict.fromkeys(spread))[:limit]


async def agree_on_config(node: DhtNode, own: RunConfig | None, initial_peers: Sequence[str]) -> RunConfig:
    """The run's configuration: published by others, or our own if we are the first.

    Raises:
        ConfigMismatch: ours differs from the run's, naming the field.
        SwarmError: nobody has published one and we have none either.
    """
    if not initial_peers:
        assert own is not None, "the first peer brings a configuration"
        return own
    published = await discover_config(node, now=time.time())
    if own is not None:
        configs.check_same(own, published)
    return published


def check_version(records: Sequence[PeerRecord]) -> None:
    """Raise IncompatibleVersion if the others speak another protocol."""
    for record in records:
        if record.protocol_version != PROTOCOL_VERSION:
            raise IncompatibleVersion(
                f"{record.name} runs swarm {record.software_version} (protocol {record.protocol_version}), this is "
                f"protocol {PROTOCOL_VERSION}: install the same release on every machine"
            )


def seeded_router(clock: Clock, seed: str) -> Router:
    """A router whose choices follow from `seed`."""
    return Router(clock, random.Random(seed))


def default_name() -> str:
    """Host name and process id."""
    import os

    return f"{socket.gethostname()[:40]}-{os.getpid()}"


async def first_look(directory: DhtDirectory, known: KnownPeers, num_stages: int) -> None:
    """Fill the known peers once, before anything relies on them."""
    for stage in range(num_stages):
        known.update(stage, await directory.peers(stage))
