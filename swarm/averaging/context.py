"""What every part of one peer's averaging is given: who and where the peer is, and what it works with.

Made by the stage peer's program, before averaging/averager builds them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from swarm.averaging.timing import Timing
from swarm.averaging.transport import Transport
from swarm.config import RunConfig
from swarm.errors import NotReady
from swarm.events.kinds import Events, NoEvents
from swarm.machine.clock import Clock
from swarm.rpc.v1.stage_pb2 import Address
from swarm.types import PROTOCOL_VERSION, PeerId, PeerRecord


class Tasks:
    """The tasks of one peer's averaging. None can be started before it runs or after its end."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Tasks can be started inside. At its end all of them are awaited; what one of them raises ends the others."""
        async with asyncio.TaskGroup() as self._group:
            yield

    def require_running(self) -> None:
        """Raise NotReady if this peer does not average yet."""
        if self._group is None:
            raise NotReady("this peer does not average yet")

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a task that outlives the call that asked for it. Raises NotReady."""
        try:
            self.require_running()
            assert self._group is not None
            return self._group.create_task(work)
        except (NotReady, RuntimeError):
            work.close()
            raise NotReady("this peer is stopping") from None


@dataclass(frozen=True, kw_only=True)
class Context:
    """One peer's surroundings.

    Attributes:
        own: this peer's record; stage, endpoint and certificate are used.
        peers: gives the directory's last known view of a stage.
    """

    config: RunConfig
    own: PeerRecord
    peers: Callable[[int], Sequence[PeerRecord]]
    transport: Transport
    clock: Clock
    timing: Timing = field(default_factory=Timing)
    events: Events = field(default_factory=NoEvents)
    tasks: Tasks = field(default_factory=Tasks)

    @property
    def own_id(self) -> PeerId:
        """This peer's id."""
        return PeerId(self.own.peer_id)

    @property
    def address(self) -> Address:
        """What this peer's messages to others of its stage begin with."""
        return self.address_of(self.own.stage)

    def address_of(self, stage: int) -> Address:
        """What messages to a peer of some stage begin with."""
        return Address(run_id=self.config.run_id, protocol_version=PROTOCOL_VERSION, stage=stage)
