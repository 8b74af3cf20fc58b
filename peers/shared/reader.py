"""A process that is in a run only to ask its peers: it serves nothing and announces no stage.

Used by swarm-trainer, swarm-generate and `swarm-model export`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from peers.shared.entrance import Entrance
from peers.shared.membership import Membership
from peers.shared.network import agree_on_config
from peers.shared.token_option import admitted
from swarm.credentials.identity import generate
from swarm.dht import node as dht_node
from swarm.machine.clock import Clock


@asynccontextmanager
async def reading(entrance: Entrance, clock: Clock) -> AsyncIterator[Membership]:
    """Be in a run inside the block, under a new identity. No peer is known yet when the block begins.

    Raises:
        What Entrance.dht_addresses, dht_node.start and agree_on_config raise.
    """
    addresses = await entrance.dht_addresses(clock)
    # This blocks the loop for some seconds, but there is nothing else to do yet.
    node = dht_node.start(clock=clock, initial_peers=addresses, client_mode=True)
    try:
        identity = admitted(generate(), entrance.token)
        config = await agree_on_config(node, None, addresses, clock, identity.authority, run=entrance.run)
        member = Membership.enter(config, node, identity, clock, insecure=entrance.insecure)
        try:
            yield member
        finally:
            await member.channels.close()
    finally:
        node.shutdown()
