"""Remembers, from one call to the next, which nodes of the DHT keep a key.

hivemind searches for these nodes at every call, and each of the five answers with everything that it has under the key.
Here a read asks only one of them, a different one each time, and a store goes straight to all. If one of them does not
answer, hivemind searches after all. Otherwise a lying node could name nodes that do not exist, and become the only one
that is asked.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from swarm.dht.known_records import Found
from swarm.machine.clock import Clock

SEARCH_SECONDS = 30.0
"""After this time the nearest nodes are searched for again."""


class Keepers:
    """The nodes that keep one key, as far as this node knows."""

    def __init__(self, node: Any, key: str, clock: Clock, *, client_mode: bool) -> None:
        """`node` is hivemind's DHTNode; a client keeps nothing itself."""
        self._node = node
        self._protocol = node.protocol
        self._id_type = type(node.node_id)
        """hivemind's DHTID, which only kademlia may import."""
        self._key_id = self._id_type.generate(key)
        self._clock = clock
        self._own = {} if client_mode else {node.node_id: node.peer_id}
        self._nearest: dict[Any, Any] = {}
        """The libp2p ids of the keepers by node id, the nearest to the key first."""
        self._searched_at = float("-inf")
        # This number differs from node to node, so that different readers begin with different keepers.
        self._turn = int(node.node_id)

    async def read(self) -> Found | None:
        """Read the key from one of the other keepers, a different one each time, and add what this node has itself.

        None if there are no other keepers, or if the one that is asked does not answer, and so is a keeper no longer.
        """
        await self._update()
        others = self._others()
        if not others:
            return None
        self._turn += 1
        node_id, peer_id = list(others.items())[self._turn % len(others)]
        reply = await self._node._call_find_with_blacklist(peer_id, [self._key_id])
        if reply is None:
            self._lost(node_id)
            return None
        value, nearby = reply[self._key_id]
        self._choose({**nearby, **self._nearest})
        found = self._unpack(self._protocol.storage.get(self._key_id))
        for subkey, (record, expiration) in self._unpack(value).items():
            if subkey not in found or expiration > found[subkey][1]:
                found[subkey] = (record, expiration)
        return found

    async def store(self, subkey: str, value: bytes, expiration: float) -> tuple[bool, bool]:
        """Send a sealed record to all keepers. Returns whether another keeper accepted it (if no other answers, whether
        this node did), and whether all nodes that should have the record were asked and answered."""
        await self._update()
        others = self._others()
        is_keeper = len(others) < len(self._nearest)
        took_it = is_keeper and self._store_here(subkey, value, expiration)
        if not others:
            # Nodes that did not answer a moment ago may be back, so the second value is True only if no neighbour is
            # known.
            return took_it, is_keeper and not self._protocol.routing_table.uid_to_peer_id
        packed = self._protocol.serializer.dumps(value)
        answers = await asyncio.gather(
            *(
                self._protocol.call_store(peer_id, [self._key_id], [packed], [expiration], [subkey])
                for peer_id in others.values()
            )
        )
        for (node_id, peer_id), answer in zip(others.items(), answers, strict=True):
            if answer is None:
                self._node.blacklist.register_failure(peer_id)
                self._lost(node_id)
        heard = {peer: answer for peer, answer in zip(others.values(), answers, strict=True) if answer is not None}
        if heard:
            # Only the others' answers count, because this node's own clock or token may be wrong.
            took_it = any(answer and all(answer) for answer in heard.values())
            took_it = took_it or await self._has(next(iter(heard)), subkey, expiration)
        return took_it, len(heard) == len(answers)

    async def _has(self, peer_id: Any, subkey: str, expiration: float) -> bool:
        """Whether a node that refused a record has it already. (Nodes copy what they keep to new nodes near the
        key.)"""
        reply = await self._node._call_find_with_blacklist(peer_id, [self._key_id])
        if reply is None:
            return False
        _, kept_until = self._unpack(reply[self._key_id][0]).get(subkey, (b"", 0.0))
        return kept_until == expiration

    def _others(self) -> dict[Any, Any]:
        return {node_id: peer_id for node_id, peer_id in self._nearest.items() if node_id not in self._own}

    def _store_here(self, subkey: str, value: bytes, expiration: float) -> bool:
        packed, packed_subkey = map(self._protocol.serializer.dumps, (value, subkey))
        if not self._protocol._validate_record(self._key_id.to_bytes(), packed_subkey, packed, expiration):
            return False
        return bool(self._protocol.storage.store_subkey(self._key_id, subkey, packed, expiration))

    async def _update(self) -> None:
        if self._clock.monotonic() - self._searched_at > SEARCH_SECONDS:
            # The search is for the id next to the key's. Nothing is stored there, so the answers contain only nodes.
            beside = self._id_type(self._key_id ^ 1)
            found = await self._node.find_nearest_nodes([beside], self._protocol.num_replicas, exclude_self=True)
            self._nearest, self._searched_at = found[beside], self._clock.monotonic()
        neighbours = self._protocol.routing_table.get_nearest_neighbors(
            self._key_id, self._protocol.num_replicas, exclude=self._node.node_id
        )
        self._choose({**self._nearest, **dict(neighbours)})

    def _choose(self, candidates: Mapping[Any, Any]) -> None:
        # Only ids that follow from a libp2p key count. Otherwise a liar could name itself under five ids near the key.
        genuine = {node_id: p for node_id, p in candidates.items() if self._id_type.generate(str(p)) == node_id}
        candidates = {**self._node._filter_blacklisted(genuine), **self._own}
        by_distance = sorted(candidates.items(), key=lambda item: self._key_id.xor_distance(item[0]))
        self._nearest = dict(by_distance[: self._protocol.num_replicas])

    def _lost(self, node_id: Any) -> None:
        self._nearest.pop(node_id, None)
        self._searched_at = float("-inf")

    def _unpack(self, found: Any) -> Found:
        if found is None or not hasattr(found.value, "items"):
            return {}
        loads = self._protocol.serializer.loads
        return {subkey: (loads(entry.value), entry.expiration_time) for subkey, entry in found.value.items()}
