"""Decides whether this peer's node of the DHT is a client: a node that nobody reaches goes on as a client.

A client does not listen. So while others dial it, `answering_as_node` listens at the node's port in its place. If they
reach it, the node becomes a full node again, which others ask.
"""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from peers.reach.listen import Listen, Outside
from peers.reach.own_port import answering_as_node
from swarm.dht import addresses
from swarm.dht.node import DhtNode
from swarm.errors import SwarmError
from swarm.rpc.endpoint import endpoint_of, host_and_port
from swarm.rpc.meeting.check import MAX_ENDPOINTS

logger = logging.getLogger(__name__)


class DhtReach:
    """How others reach one peer's node of the DHT.

    Attributes:
        addresses: where others are told to enter the DHT, the best first; none while the node is a client.
        port: the TCP port of this machine at which others reach the node; 0 if it has never been asked.
    """

    def __init__(self, node: DhtNode, listen: Listen) -> None:
        self.addresses = listen.dht_addresses
        self.port = listen.dht_port if listen.dht_addresses else 0
        self._node = node
        self._place = listen.node
        self._named = listen.dht_addresses
        self._own = {one.host for one in listen.own}

    @property
    def named(self) -> str:
        return ", ".join(endpoint_of(*place) for place in map(addresses.place, self._named))

    def moved(self, own: Sequence[Outside]) -> None:
        """Name the addresses that the machine has now in place of its former ones. Those that the user named stay."""
        if self._named:
            _, libp2p_id = addresses.split(self._named[0])
            kept = [named for named in self._named if addresses.place(named)[0] not in self._own]
            new = [f"{addresses.at(one.host, self.port)}/p2p/{libp2p_id}" for one in own]
            self._named, self._own = (*kept, *new), {one.host for one in own}

    @asynccontextmanager
    async def answering(self, forwarded_port: int | None) -> AsyncIterator[Sequence[str]]:
        """Make sure that the node's port answers inside the block. Yields the endpoints that others are to dial; none
        if the port cannot answer.

        Args:
            forwarded_port: the router's port that leads to the node's; None if the router forwards none.
        """
        places = [addresses.place(address) for address in self.addresses or self._named][: MAX_ENDPOINTS - 1]
        # Others also try the address from which they see this peer call.
        seen = [f":{forwarded_port or port}" for _, port in places[:1]]
        ends = [*(endpoint_of(*place) for place in places), *seen]
        async with AsyncExitStack() as stack:
            if places and not self.addresses:
                try:
                    await stack.enter_async_context(answering_as_node(*self._place))
                except OSError as error:
                    logger.debug("the port of the DHT's node is taken: %s", error)
                    ends = []
            yield ends

    def is_forwarded_from(self, host: str, port: int) -> None:
        """Announce the node at a router's address too, while nobody can say whether it is reached there."""
        if self.addresses and port:
            _, libp2p_id = addresses.split(self._named[0])
            self.addresses = (f"{addresses.at(host, port)}/p2p/{libp2p_id}", *self.addresses)

    async def conclude(self, reached: Sequence[str]) -> None:
        """Announce the node at these endpoints. If there are none, make the node a client, which nobody asks.

        Args:
            reached: the endpoints at which others reached the node's port, the best first.
        """
        if not reached and self.addresses:
            self.addresses = ()
            logger.info(
                "others do not reach its node of the DHT at %s: from now on it asks, and is not asked", self.named
            )
            await self._become(client_mode=True)
        if not reached or not self._named:
            return
        if not self.addresses:
            if not await self._become(client_mode=False):
                return
            logger.info("others reach its node of the DHT at %s by now: from now on it is asked again", reached[0])
        _, libp2p_id = addresses.split(self._named[0])
        ends = map(host_and_port, reached)
        found = (f"{addresses.at(host, port)}/p2p/{libp2p_id}" for host, port in ends)
        # Nobody outside reaches the machine's own, which are for processes on it and in its network.
        own = (named for named in self._named if addresses.place(named)[0] in self._own)
        self.addresses = tuple(dict.fromkeys([*found, *own]))

    async def _become(self, *, client_mode: bool) -> bool:
        try:
            await self._node.become(client_mode=client_mode)
        except (SwarmError, OSError) as error:
            logger.debug("the node of the DHT stays what it is: %s", error)
            return False
        return True
