"""All members' sides of an exchange in one process."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.averaging.vectors.allreduce import Reduction
from swarm.averaging.vectors.exchange import Side
from swarm.averaging.wire.transport import Payload
from swarm.compression.codec import Buffer
from swarm.errors import PeerUnavailable


@dataclass
class Hall:
    """All members' sides in one process."""

    sides: Mapping[str, Side]
    silent: set[str] = field(default_factory=set)

    async def exchange(self, sender: str, peer_id: str, part: Buffer) -> Payload:
        """A member's call to another one."""
        if peer_id in self.silent:
            raise PeerUnavailable("hung up")
        side = self.sides[peer_id]
        if isinstance(side, Reduction) and sender in side.missing:
            await side.add(sender, bytes(part))
        return await side.result()


@dataclass
class Door:
    """One member's way into the hall."""

    hall: Hall
    own_id: str

    async def exchange(self, peer_id: str, part: Buffer, reply_bytes: int, *, waits: bool = True) -> Payload:
        """See AllReduceTransport."""
        payload = await self.hall.exchange(self.own_id, peer_id, part)
        assert len(payload.encoded) == reply_bytes
        return payload
