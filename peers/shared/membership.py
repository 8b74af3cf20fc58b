"""A process in its run: what the parts of the process share.

Made by swarm-peer and swarm-trainer once they know the run's configuration.
"""

import random
from dataclasses import dataclass, field
from typing import Self

from peers.shared.network import KnownPeers
from swarm.config import RunConfig
from swarm.content.fetcher import Fetcher
from swarm.content.line import Kind, Line
from swarm.credentials.identity import Identity
from swarm.dht.directory import Directory
from swarm.dht.record_store import RecordStore
from swarm.machine.clock import Clock
from swarm.machine.waits import Waits
from swarm.routing.router import Router
from swarm.rpc.channels import ChannelPool


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The run, this process's identity in it, the peers that it knows, and its channels to them."""

    config: RunConfig
    identity: Identity
    directory: Directory
    known: KnownPeers
    channels: ChannelPool
    clock: Clock
    waits: Waits = field(default_factory=Waits)

    @classmethod
    def enter(cls, config: RunConfig, store: RecordStore, identity: Identity, clock: Clock, *, insecure: bool) -> Self:
        """Enter a run whose records are in `store`. No peer is known yet, and nothing is announced."""
        return cls(
            config=config,
            identity=identity,
            directory=Directory(store, identity, config.run_id, clock),
            known=KnownPeers(Router(clock, random.Random(identity.peer_id)), own_id=identity.peer_id),
            channels=ChannelPool(insecure=insecure, identity=identity, clock=clock),
            clock=clock,
        )

    @property
    def peer_id(self) -> str:
        """This process's id."""
        return self.identity.peer_id

    def fetcher(self, kind: Kind) -> Fetcher:
        """Make a fetcher of content (what the run's configuration names by digest) from the run's peers."""
        line, rng = Line(self.config.run_id, self.channels, own_id=self.peer_id), random.Random(self.peer_id)
        return Fetcher(line, kind, self.known.everyone, self.clock, rng)

    @property
    def stages(self) -> range:
        """The run's stages."""
        return range(self.config.stages.num_stages)
