"""A place from which a run is looked at: through one of its peers, or from the DHT as a client.

Used by swarm-status and swarm-dashboard, which look again and again. It announces nothing and changes nothing. Through
a peer it imports neither torch nor hivemind.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

from peers.shared.entrance import Entrance
from peers.shared.network import agree_on_config
from peers.shared.token_option import admitted
from peers.status.observe import observe
from peers.status.view import SwarmView
from swarm.config import RunConfig
from swarm.credentials.identity import generate
from swarm.dht import node as dht_node
from swarm.dht.directory import Directory
from swarm.dht.discovery import discover_config
from swarm.dht.lookup import PeerStore
from swarm.dht.node import DhtNode
from swarm.machine.clock import SystemClock
from swarm.rpc.channels import ChannelPool
from swarm.types import PeerRecord, PeerState


class Lookout:
    """Of one run."""

    def __init__(
        self, config: RunConfig, directory: Directory, channels: ChannelPool,
        on_peers: Callable[[Sequence[PeerRecord]], None] = lambda records: None,
    ) -> None:  # fmt: skip
        """
        Args:
            on_peers: told of the peers that serve, after each reading of the directory.
        """
        self.config = config
        self._directory = directory
        self._channels = channels
        self._on_peers = on_peers
        self._records: dict[int, Sequence[PeerRecord]] = {}

    @property
    def records(self) -> Mapping[int, Sequence[PeerRecord]]:
        """What was announced at each stage, as the last view saw it."""
        return self._records

    async def view(self) -> SwarmView:
        """The run now: read the directory, and ask every peer. Raises what RecordStore.get raises."""
        numbers = range(self.config.stages.num_stages)
        rows, trainers, claims = await asyncio.gather(
            asyncio.gather(*map(self._directory.peers, numbers)), self._directory.trainers(), self._directory.claims()
        )
        self._records = dict(zip(numbers, rows, strict=True))
        self._on_peers([record for row in rows for record in row if record.state is PeerState.SERVING])
        return await observe(self.config.run_id, self._records, trainers, self._channels, claims=claims)


@contextmanager
def node_for(entrance: Entrance) -> Iterator[DhtNode | None]:
    """A node of the DHT inside the block, as a client, if the entrance names addresses of nodes and no peers.

    To be opened before the event loop is, since it blocks. Raises what dht_node.start raises.
    """
    if entrance.entries:
        yield None
        return
    node = dht_node.start(clock=SystemClock(), initial_peers=entrance.addresses, client_mode=True)
    try:
        yield node
    finally:
        node.shutdown()


@asynccontextmanager
async def lookout_at(entrance: Entrance, node: DhtNode | None) -> AsyncIterator[Lookout]:
    """A place from which the run is seen: the directory as one of its peers shows it, or as `node` finds it.

    Raises:
        ValueError, IncompatibleVersion, PeerUnavailable: as of discover_config, PeerStore.get and agree_on_config.
    """
    clock, identity = SystemClock(), admitted(generate(), entrance.token)
    channels = ChannelPool(insecure=entrance.insecure, identity=identity, clock=clock)
    try:
        if node is not None:
            config = await agree_on_config(node, None, entrance.addresses, clock, identity.authority)
            yield Lookout(config, Directory(node, identity, config.run_id, clock), channels)
            return
        store = PeerStore(entrance.entries, channels, identity, insecure=entrance.insecure)
        try:
            address = str(entrance.entries[0])
            config = await discover_config(
                store, clock, address=address, authority=identity.authority, run=entrance.run
            )  # fmt: skip
            yield Lookout(config, Directory(store, identity, config.run_id, clock), channels, store.learn)
        finally:
            await store.close()
    finally:
        await channels.close()
